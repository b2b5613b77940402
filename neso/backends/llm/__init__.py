"""Serves language models by Neso's own engine."""

from neso.backends.llm.backend import LlmBackend

__all__ = ["LlmBackend"]
