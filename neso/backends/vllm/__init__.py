"""Language models on vLLM's engine."""
