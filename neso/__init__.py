"""Neso: an inference server for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neso.engine.client.llm import LLM
    from neso.engine.text.tokenizer import Tokenizer, load_tokenizer
    from neso.frontends.inprocess_frontends import KServeGrpc, KServeHttp, Metrics
    from neso.generation import SamplingParams
    from neso.server.errors import (
        AlreadyExists,
        Cancelled,
        InternalError,
        InvalidArgument,
        NotFound,
        ServerError,
        Unavailable,
        Unsupported,
    )
    from neso.server.inprocess import (
        InferenceRequest,
        InferenceResponse,
        MemoryType,
        Metric,
        MetricFamily,
        MetricKind,
        Model,
        Options,
        Server,
        Tensor,
    )
    from neso.server.options import ModelControlMode
    from neso.server.tensor import DataType

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AlreadyExists",
    "Cancelled",
    "DataType",
    "InferenceRequest",
    "InferenceResponse",
    "InternalError",
    "InvalidArgument",
    "KServeGrpc",
    "KServeHttp",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "Metrics",
    "Model",
    "ModelControlMode",
    "NotFound",
    "Options",
    "SamplingParams",
    "Server",
    "ServerError",
    "Tensor",
    "Tokenizer",
    "Unavailable",
    "Unsupported",
    "__version__",
    "load_tokenizer",
]

# Imported on first use, so that `import neso` is fast.
_MODULES = {
    "neso.engine.client.llm": ("LLM",),
    "neso.engine.text.tokenizer": ("Tokenizer", "load_tokenizer"),
    "neso.frontends.inprocess_frontends": ("KServeGrpc", "KServeHttp", "Metrics"),
    "neso.generation": ("SamplingParams",),
    "neso.server.tensor": ("DataType",),
    "neso.server.errors": (
        "AlreadyExists",
        "Cancelled",
        "InternalError",
        "InvalidArgument",
        "NotFound",
        "ServerError",
        "Unavailable",
        "Unsupported",
    ),
    "neso.server.inprocess": (
        "InferenceRequest",
        "InferenceResponse",
        "MemoryType",
        "Metric",
        "MetricFamily",
        "MetricKind",
        "Model",
        "Options",
        "Server",
        "Tensor",
    ),
    "neso.server.options": ("ModelControlMode",),
}
_LAZY = {name: module for module, names in _MODULES.items() for name in names}


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
