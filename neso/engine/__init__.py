"""The LLM engine."""
