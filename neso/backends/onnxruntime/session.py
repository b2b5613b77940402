"""Sessions of ONNX Runtime: session options, execution providers, and the model's signature."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from neso.backends.tensor import Instance, InstanceKind, Parameters
from neso.backends.tensor.signature import ModelSignature, ModelTensor
from neso.server.errors import InternalError, InvalidArgument, Unsupported
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)


GRAPH_LEVELS = {
    -1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
}
_DATATYPES = {
    "tensor(bool)": DataType.BOOL,
    "tensor(uint8)": DataType.UINT8,
    "tensor(uint16)": DataType.UINT16,
    "tensor(uint32)": DataType.UINT32,
    "tensor(uint64)": DataType.UINT64,
    "tensor(int8)": DataType.INT8,
    "tensor(int16)": DataType.INT16,
    "tensor(int32)": DataType.INT32,
    "tensor(int64)": DataType.INT64,
    "tensor(float16)": DataType.FP16,
    "tensor(float)": DataType.FP32,
    "tensor(double)": DataType.FP64,
    "tensor(bfloat16)": DataType.BF16,
    "tensor(string)": DataType.BYTES,
}
_global_threads = False


@dataclass(frozen=True, slots=True)
class Session:
    """A loaded model. Thread-safe."""

    runtime: onnxruntime.InferenceSession
    signature: ModelSignature


def read_signature(path: Path) -> ModelSignature:
    """Read the signature of a model file. Raises `ServerError`."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return _open(path, options, ["CPUExecutionProvider"]).signature


def open_session(path: Path, config: Any, settings: Parameters, instance: Instance) -> Session:
    """Load a model for an instance. Raises `ServerError`."""
    return _open(path, _session_options(config, settings), find_providers(config, instance))


def _open(path: Path, options: onnxruntime.SessionOptions, providers: list[Any]) -> Session:
    if not path.is_file():
        raise InvalidArgument(f"unable to find '{path}' for the model")
    options.log_severity_level = 3  # log only errors, which are also raised
    try:
        runtime = _start(path, options, providers)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise InternalError(f"onnx runtime error: failed to load '{path.name}': {error}") from None
    requested = [name if isinstance(name, str) else name[0] for name in providers]
    # If a provider's libraries are missing, ONNX Runtime only logs it and falls back to the CPU.
    missing = [name for name in requested if name not in runtime.get_providers()]
    if missing:
        raise InternalError(
            f"onnx runtime could not start {', '.join(missing)} for '{path.name}', is its library installed?"
        )
    signature = ModelSignature(
        _tensors(runtime.get_inputs()),
        _tensors(runtime.get_outputs()),
        _tensors(runtime.get_overridable_initializers()),
    )
    return Session(runtime, signature)


def _start(
    path: Path, options: onnxruntime.SessionOptions, providers: list[Any]
) -> onnxruntime.InferenceSession:
    # Once the global thread pool exists, sessions with their own threads are rejected. Another model may create it
    # concurrently.
    options.use_per_session_threads = not _global_threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception:
        if not (options.use_per_session_threads and _global_threads):
            raise
    return _start(path, options, providers)


def _tensors(nodes: Iterable[Any]) -> dict[str, ModelTensor]:
    return {
        node.name: ModelTensor(
            node.name,
            node.type,
            _DATATYPES.get(node.type),
            tuple(extent if isinstance(extent, int) and extent >= 0 else -1 for extent in node.shape),
        )
        for node in nodes
    }


def _session_options(config: Any, settings: Parameters) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    level = int(config.optimization.graph.level)
    if level not in GRAPH_LEVELS:
        raise InvalidArgument(
            f"optimization graph level of model '{config.name}' is {level}, expected one of "
            f"{', '.join(map(str, GRAPH_LEVELS))}"
        )
    options.graph_optimization_level = GRAPH_LEVELS[level]
    if settings.boolean("enable-global-threadpool", False):
        _use_global_threads(settings)
    else:
        options.intra_op_num_threads = settings.integer("intra_op_thread_count", 0)
        options.inter_op_num_threads = settings.integer("inter_op_thread_count", 0)
    if settings.integer("execution_mode", 0):
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.enable_cpu_mem_arena = settings.boolean("enable_mem_arena", True)
    options.enable_mem_pattern = settings.boolean("enable_mem_pattern", True)
    for name, value in settings.items():
        if name.startswith("session."):
            options.add_session_config_entry(name, value)
    return options


def _use_global_threads(settings: Parameters) -> None:
    """Create the process-wide thread pool, unless it exists. The first model determines its size."""
    global _global_threads
    if not _global_threads:
        _global_threads = True
        onnxruntime.set_global_thread_pool_sizes(
            settings.integer("intra_op_thread_count", 0), settings.integer("inter_op_thread_count", 0)
        )


CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_ACCELERATORS = {
    InstanceKind.CPU: {"openvino": "OpenVINOExecutionProvider"},
    InstanceKind.GPU: {"tensorrt": "TensorrtExecutionProvider", "cuda": CUDA},
}
# Options with a different name in the configuration.
_TENSORRT_OPTIONS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_TENSORRT_PRECISIONS: dict[str, dict[str, str]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}
_CUDA_PARAMETERS = (
    "cudnn_conv_algo_search",
    "gpu_mem_limit",
    "arena_extend_strategy",
    "do_copy_in_default_stream",
)
# Options that are numbers in the configuration and names in ONNX Runtime.
_CUDA_VALUES = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
}

Provider = str | tuple[str, dict[str, str]]


def find_providers(config: Any, instance: Instance) -> list[Provider]:
    """Return the execution providers of an instance by descending priority, the CPU last. Raises `ServerError`."""
    kind = InstanceKind.GPU if instance.kind is InstanceKind.GPU else InstanceKind.CPU
    accelerators = config.optimization.execution_accelerators
    requested: dict[str, dict[str, str]] = {}
    configured = accelerators.gpu_execution_accelerator
    if kind is InstanceKind.CPU:
        configured = accelerators.cpu_execution_accelerator
    for accelerator in configured:
        provider = _ACCELERATORS[kind].get(accelerator.name.lower())
        if provider is None:
            raise InvalidArgument(
                f"unknown {kind.value} execution accelerator '{accelerator.name}' is requested for '{config.name}', "
                f"expected one of {', '.join(_ACCELERATORS[kind])}"
            )
        requested[provider] = _provider_options(provider, dict(accelerator.parameters), config.name)
    if kind is InstanceKind.GPU:
        requested[CUDA] = _cuda_parameters(config) | requested.pop(CUDA, {})
        for options in requested.values():
            options["device_id"] = str(instance.device)
    available = onnxruntime.get_available_providers()
    for provider in requested:
        if provider not in available:
            raise Unsupported(
                f"model '{config.name}' needs {provider}, this build of onnxruntime has "
                f"{', '.join(available)}"
            )
    return [*requested.items(), CPU]


def _provider_options(provider: str, parameters: dict[str, str], model: str) -> dict[str, str]:
    if provider != "TensorrtExecutionProvider":
        return parameters
    options = {_TENSORRT_OPTIONS.get(name, name): value for name, value in parameters.items()}
    precision = options.pop("precision_mode", "FP32")
    if precision not in _TENSORRT_PRECISIONS:
        raise InvalidArgument(
            f"precision_mode of model '{model}' is '{precision}', expected one of {', '.join(_TENSORRT_PRECISIONS)}"
        )
    return options | _TENSORRT_PRECISIONS[precision]


def _cuda_parameters(config: Any) -> dict[str, str]:
    """Return the CUDA options in the model's parameters, as in older configurations."""
    options = {}
    for name in _CUDA_PARAMETERS:
        if name in config.parameters:
            value = config.parameters[name].string_value
            options[name] = _CUDA_VALUES.get(name, {}).get(value, value)
    return options
