"""Neso: an inference server for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neso.engine.llm import LLM
    from neso.generation import SamplingParams
    from neso.server.inprocess import Server

__version__ = "0.1.0"

__all__ = ["LLM", "SamplingParams", "Server", "__version__"]

# Imported when they are first used, so that `import neso` costs nothing.
_LAZY = {"LLM": "neso.engine.llm", "SamplingParams": "neso.generation", "Server": "neso.server.inprocess"}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'neso' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
