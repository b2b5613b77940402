"""Backend `vllm`: language models on vLLM's engine."""
