"""Backend `llm`: language models on Neso's engine."""

from neso.backends.llm.backend import LlmBackend

__all__ = ["LlmBackend"]
