"""Backend `tensorrtllm`: TensorRT-LLM's Triton model `tensorrt_llm` (token ids in and out) on Neso's engine."""
