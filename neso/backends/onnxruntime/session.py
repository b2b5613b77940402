"""Sessions of ONNX Runtime: how they are opened, and what tensors they take and give."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from neso.backends.tensor import Instance, InstanceKind, Parameters
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
class OnnxTensor:
    """An input or output of a graph. `datatype` is None for what is no tensor, or of elements that nobody can send.

    `shape`: -1 where it varies.
    """

    name: str
    type: str
    datatype: DataType | None
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OnnxSignature:
    """What a model takes and gives. `optional`: inputs that the model has values for."""

    inputs: dict[str, OnnxTensor]
    optional: dict[str, OnnxTensor]
    outputs: dict[str, OnnxTensor]


@dataclass(frozen=True, slots=True)
class Session:
    """An opened model. ONNX Runtime lets any number of threads run it at the same time."""

    runtime: onnxruntime.InferenceSession
    signature: OnnxSignature


def read_signature(path: Path) -> OnnxSignature:
    """Of the model in a file. Raises `ServerError`."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return _open(path, options, ["CPUExecutionProvider"]).signature


def open_session(path: Path, config: Any, settings: Parameters, instance: Instance) -> Session:
    """For an instance. `settings`: the model's parameters over the backend's. Raises `ServerError`."""
    return _open(path, _session_options(config, settings), find_providers(config, instance))


def _open(path: Path, options: onnxruntime.SessionOptions, providers: list[Any]) -> Session:
    if not path.is_file():
        raise InvalidArgument(f"unable to find '{path}' for the model")
    options.log_severity_level = 3  # what goes wrong is raised
    try:
        runtime = _start(path, options, providers)
    except Exception as error:  # ONNX Runtime has no common class for its errors
        raise InternalError(f"onnx runtime error: failed to load '{path.name}': {error}") from None
    wanted = [name if isinstance(name, str) else name[0] for name in providers]
    # ONNX Runtime falls back on the CPU with a line in its log when a provider's libraries are not there.
    missing = [name for name in wanted if name not in runtime.get_providers()]
    if missing:
        raise InternalError(
            f"onnx runtime could not start {', '.join(missing)} for '{path.name}', is its library installed?"
        )
    signature = OnnxSignature(
        _tensors(runtime.get_inputs()),
        _tensors(runtime.get_overridable_initializers()),
        _tensors(runtime.get_outputs()),
    )
    return Session(runtime, signature)


def _start(
    path: Path, options: onnxruntime.SessionOptions, providers: list[Any]
) -> onnxruntime.InferenceSession:
    # Once there are threads for all, sessions with their own are refused; another model's may come at any moment.
    options.use_per_session_threads = not _global_threads
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception:
        if not (options.use_per_session_threads and _global_threads):
            raise
    return _start(path, options, providers)


def _tensors(nodes: Iterable[Any]) -> dict[str, OnnxTensor]:
    return {
        node.name: OnnxTensor(
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
    """One pool for all sessions of the process, made once: the first to ask says how large."""
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
# Where the name in a configuration is not that of the provider.
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
# ONNX Runtime takes names where a configuration has numbers.
_CUDA_VALUES = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
}

Provider = str | tuple[str, dict[str, str]]


def find_providers(config: Any, instance: Instance) -> list[Provider]:
    """For an instance, best first; the CPU takes what the others cannot. Raises `ServerError`."""
    kind = InstanceKind.GPU if instance.kind is InstanceKind.GPU else InstanceKind.CPU
    accelerators = config.optimization.execution_accelerators
    wanted: dict[str, dict[str, str]] = {}
    given = accelerators.gpu_execution_accelerator
    if kind is InstanceKind.CPU:
        given = accelerators.cpu_execution_accelerator
    for accelerator in given:
        provider = _ACCELERATORS[kind].get(accelerator.name.lower())
        if provider is None:
            raise InvalidArgument(
                f"unknown {kind.value} execution accelerator '{accelerator.name}' is requested for '{config.name}', "
                f"expected one of {', '.join(_ACCELERATORS[kind])}"
            )
        wanted[provider] = _provider_options(provider, dict(accelerator.parameters), config.name)
    if kind is InstanceKind.GPU:
        wanted[CUDA] = _cuda_parameters(config) | wanted.pop(CUDA, {})
        for options in wanted.values():
            options["device_id"] = str(instance.device)
    available = onnxruntime.get_available_providers()
    for provider in wanted:
        if provider not in available:
            raise Unsupported(
                f"model '{config.name}' asks for {provider}, this build of onnxruntime has "
                f"{', '.join(available)}"
            )
    return [*wanted.items(), CPU]


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
    """Those that older configurations have among the model's parameters."""
    options = {}
    for name in _CUDA_PARAMETERS:
        if name in config.parameters:
            value = config.parameters[name].string_value
            options[name] = _CUDA_VALUES.get(name, {}).get(value, value)
    return options
