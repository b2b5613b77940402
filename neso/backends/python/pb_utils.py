"""What Python models import as `triton_python_backend_utils`."""

from __future__ import annotations

from typing import Any

from neso.backends.python.datatypes import (
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from neso.backends.python.errors import TritonError, TritonModelException
from neso.backends.python.logger import Logger, LogLevel
from neso.backends.python.memory import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    MemoryType,
    PreferredMemory,
)
from neso.backends.python.metrics import Metric, MetricFamily
from neso.backends.python.model_config import ModelConfig
from neso.backends.python.model_module import current_folder
from neso.backends.python.request import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
)
from neso.backends.python.response import InferenceResponse
from neso.backends.python.response_sender import TRITONSERVER_RESPONSE_COMPLETE_FINAL, ResponseSender
from neso.backends.python.server_access import current_access
from neso.backends.python.tensor import Tensor
from neso.backends.python.trace import InferenceTrace

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceTrace",
    "LogLevel",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseSender",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input of that name, None if the request has none (optional inputs may be left out)."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of that name, None if the response has none."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The part of a configuration that describes an input, None if there is none of that name."""
    return _tensor_config(model_config, "input", name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The part of a configuration that describes an output, None if there is none of that name."""
    return _tensor_config(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether a configuration says that the model sends any number of responses to a request."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """The folder of the model's version. In the threads that run the model only."""
    return current_folder()


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model, or replace it; `config` is JSON, `files` ("file:1/model.py") replace the model's folder.

    Raises `TritonModelException`, also unless the server is in explicit mode.
    """
    current_access().load_model(model_name, config or None, files or None)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model when its requests in flight have ended. Raises `TritonModelException`."""
    current_access().unload_model(model_name, unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether requests for a model are accepted, and its `is_ready` function, if it has one, agrees."""
    return current_access().model_ready(model_name, model_version)


def _tensor_config(model_config: dict[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in model_config.get(kind, []) if tensor["name"] == name), None)
