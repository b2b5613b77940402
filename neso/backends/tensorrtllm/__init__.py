"""TensorRT-LLM's Triton model on Neso's engine."""

from neso.backends.tensorrtllm.backend import TensorRtLlmBackend

__all__ = ["TensorRtLlmBackend"]
