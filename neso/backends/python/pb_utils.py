"""The module `triton_python_backend_utils` of Python models."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

from neso.backends.python.arguments import as_text
from neso.backends.python.errors import TritonError, TritonModelException
from neso.backends.python.model_module import current_folder, find_current_folder
from neso.backends.python.request import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)
from neso.backends.python.response import (
    TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    InferenceResponse,
    ResponseSender,
)
from neso.backends.python.server_access import FamilyHandle, MetricHandle, current_access
from neso.backends.python.tensor import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from neso.server.errors import ServerError

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
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
    """Return the input with this name; None if the request does not have it."""
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output with this name; None if the response does not have it."""
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of an input; None if there is no input with this name."""
    return _tensor_config(model_config, "input", name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration of an output; None if there is no output with this name."""
    return _tensor_config(model_config, "output", name)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return whether the model is decoupled: it can send any number of responses to a request."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """Return the folder of the model version. Only available in the threads that run the model."""
    return current_folder()


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load or reload a model. Requires model control mode `explicit`. Raises `TritonModelException`.

    - config: JSON, overrides config.pbtxt
    - files: contents by path ("file:1/model.py"), override the model's folder
    """
    current_access().load_model(as_text(model_name, "model_name"), config or None, files or None)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Unload a model after its requests in flight have ended. Raises `TritonModelException`."""
    current_access().unload_model(as_text(model_name, "model_name"), unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model accepts requests and its `is_ready`, if any, returns true."""
    return current_access().model_ready(
        as_text(model_name, "model_name"), as_text(model_version, "model_version")
    )


def _tensor_config(model_config: dict[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in model_config.get(kind, []) if tensor["name"] == name), None)


_TENSOR_KEYS = ("name", "data_type", "dims")


class ModelConfig:
    """Argument of `auto_complete_config`: sets tensors, batching and the transaction policy."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set `max_batch_size`. Raises `ValueError` if config.pbtxt specifies a larger value."""
        given = self._config["max_batch_size"]
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config function for "
                f"model '{self._config['name']}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching. Raises `ValueError` if another scheduler is configured."""
        for scheduler in ("sequence_batching", "ensemble_scheduling"):
            if scheduler in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                    f"for model '{self._config['name']}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: dict[str, Any]) -> None:
        """Set `policy`: `{"decoupled": bool}`. Raises `ValueError` if config.pbtxt specifies a different value."""
        if set(policy) - {"decoupled"}:
            raise ValueError(
                f"model transaction property in auto-complete-config function for model '{self._config['name']}' "
                "contains property other than 'decoupled'"
            )
        given = self._config.get("model_transaction_policy")
        if given is not None and given["decoupled"] != policy.get("decoupled", False):
            raise ValueError(
                "trying to change decoupled property in auto-complete-config for model "
                f"'{self._config['name']}', which is already set to '{given['decoupled']}'"
            )
        self._config["model_transaction_policy"] = {"decoupled": bool(policy.get("decoupled", False))}

    def add_input(self, tensor: dict[str, Any]) -> None:
        """Add `{"name", "data_type", "dims", "optional"?}`. Raises `ValueError` if it contradicts config.pbtxt."""
        self._add("input", tensor, (*_TENSOR_KEYS, "optional"))

    def add_output(self, tensor: dict[str, Any]) -> None:
        """Add `{"name", "data_type", "dims"}`. Raises `ValueError` if it contradicts config.pbtxt."""
        self._add("output", tensor, _TENSOR_KEYS)

    def _add(self, kind: str, tensor: dict[str, Any], allowed: tuple[str, ...]) -> None:
        name = self._config["name"]
        which = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        where = f"{which} in auto-complete-config function for model '{name}'"
        for key in _TENSOR_KEYS:
            if key not in tensor:
                raise ValueError(f"{where} is missing '{key}' property.")
        if set(tensor) - set(allowed):
            *most, last = (f"'{key}'" for key in allowed)
            raise ValueError(f"{where} contains property other than {', '.join(most)} and {last}.")
        for given in self._config[kind]:
            if given["name"] != tensor["name"]:
                continue
            for key in ("data_type", "dims", "optional"):
                if key not in tensor:
                    continue
                unset = key not in given or given[key] in ([], "TYPE_INVALID")
                if not unset and _as_list(given[key]) != _as_list(tensor[key]):
                    raise ValueError(
                        f"model '{name}', tensor '{tensor['name']}': the model expects {key} {tensor[key]} but the "
                        f"model configuration specifies {key} {given[key]}"
                        if key != "data_type"
                        else f"unable to load model '{name}', configuration expects datatype {given[key]} for {which}, "
                        f"model provides {tensor[key]}"
                    )
                given[key] = tensor[key]
            return
        self._config[kind].append(dict(tensor))


def complete_config(config: dict[str, Any], model_class: Any) -> dict[str, Any]:
    """Run the `auto_complete_config` of a model class, if any. Raises `TritonModelException`."""
    auto_complete = getattr(model_class, "auto_complete_config", None)
    if auto_complete is None:
        return config
    completed = auto_complete(ModelConfig(copy.deepcopy(config)))
    if not isinstance(completed, ModelConfig):
        raise TritonModelException(
            f"auto_complete_config function in model '{config['name']}' must return a valid "
            "pb.ModelConfig object."
        )
    return completed.as_dict()


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


class Metric:
    """One metric of a family, created by `MetricFamily.Metric`.

    As in Triton, methods raise `TritonModelException` after the family has been deleted.
    """

    def __init__(self, family: MetricFamily, metric: MetricHandle) -> None:
        self._family = weakref.ref(family)
        self._held_by_family = weakref.ref(metric)

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. Raises `TritonModelException` for a negative increment of a counter."""
        with _server_errors():
            self._metric().increment(value)

    def set(self, value: float) -> None:
        """Set a gauge. Raises `TritonModelException` for other kinds."""
        with _server_errors():
            self._metric().set(value)

    def observe(self, value: float) -> None:
        """Add an observation to a histogram. Raises `TritonModelException` for other kinds."""
        with _server_errors():
            self._metric().observe(value)

    def value(self) -> float:
        """Return the current value of a counter or gauge. Raises `TritonModelException` for a histogram."""
        with _server_errors():
            return self._metric().value()

    def _metric(self) -> MetricHandle:
        family, metric = self._family(), self._held_by_family()
        if family is None or metric is None:
            raise TritonModelException(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. "
                "Keep the 'MetricFamily' for as long as its metrics are used."
            )
        return metric


class MetricFamily:
    """A metric family, exported at /metrics as long as this object exists.

    Families with the same name and kind are shared between models. A metric is exported until the last family that
    created it is deleted.

    Raises `TritonModelException` if the name is invalid, or used by another kind or by the server.
    """

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    def __init__(self, name: str = "", description: str = "", kind: int = COUNTER) -> None:
        kinds = {self.COUNTER: "counter", self.GAUGE: "gauge", self.HISTOGRAM: "histogram"}
        if kind not in kinds:
            raise TritonModelException(f"unknown kind {kind!r} of metric family '{name}'")
        with _server_errors():
            self._family: FamilyHandle = current_access().metric_family(name, description, kinds[kind])
        self._metrics: set[MetricHandle] = set()

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Get or create the metric with these labels. Raises `TritonModelException`.

        `buckets`: increasing upper bounds, required for a histogram.
        """
        with _server_errors():
            metric = self._family.metric(labels, buckets)
        self._metrics.add(metric)
        return Metric(self, metric)


@contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        raise TritonModelException(error.message) from None


_log = logging.getLogger("neso.model")


class Logger:
    """The server's log. All methods are static. They raise `TypeError` for a message or level of another type."""

    class LogLevel(IntEnum):
        """Severity of a log message."""

        INFO = logging.INFO
        WARNING = logging.WARNING
        ERROR = logging.ERROR
        VERBOSE = logging.DEBUG

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        if not isinstance(level, LogLevel):
            raise TypeError(f"level must be a pb_utils.LogLevel, got {type(level).__name__}")
        _write_log(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        _write_log(LogLevel.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        _write_log(LogLevel.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        _write_log(LogLevel.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _write_log(LogLevel.VERBOSE, message)


LogLevel = Logger.LogLevel


def _write_log(level: int, message: str) -> None:
    message = as_text(message, "message")
    if not _log.isEnabledFor(level):
        return
    folder = find_current_folder()
    fields = {} if folder is None else {"model": Path(folder).parent.name, "model_version": Path(folder).name}
    # stacklevel 3: log the calling line of the model.
    _log.log(int(level), "%s", message, stacklevel=3, extra=fields)
