"""The backend of language models on vLLM's engine; its name is `vllm`."""
