"""The backend of language models on vLLM's engine; its name is `vllm`."""

from neso.backends.vllm.backend import VllmBackend

__all__ = ["VllmBackend"]
