"""Sessions of ONNX Runtime: how they are opened, and what tensors they take and give."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnxruntime

from neso.backends.onnxruntime.providers import find_providers
from neso.backends.tensor import Instance, Parameters
from neso.server.errors import InternalError, InvalidArgument
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
    return _open(path, _options(config, settings), find_providers(config, instance))


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


def _options(config: Any, settings: Parameters) -> onnxruntime.SessionOptions:
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
