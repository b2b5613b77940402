"""Model files of OpenVINO: read, reshape, compile, and their signature."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino.preprocess import PrePostProcessor

from neso.backends.tensor import Parameters
from neso.backends.tensor.model import Arrays
from neso.backends.tensor.signature import ModelSignature, ModelTensor, check_config, configured_dims
from neso.server.errors import InternalError, InvalidArgument, Unavailable
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)

_TYPES = {
    DataType.BOOL: openvino.Type.boolean,
    DataType.UINT8: openvino.Type.u8,
    DataType.UINT16: openvino.Type.u16,
    DataType.UINT32: openvino.Type.u32,
    DataType.UINT64: openvino.Type.u64,
    DataType.INT8: openvino.Type.i8,
    DataType.INT16: openvino.Type.i16,
    DataType.INT32: openvino.Type.i32,
    DataType.INT64: openvino.Type.i64,
    DataType.FP16: openvino.Type.f16,
    DataType.FP32: openvino.Type.f32,
    DataType.FP64: openvino.Type.f64,
    DataType.BF16: openvino.Type.bf16,
    DataType.BYTES: openvino.Type.string,
}
_DATATYPES = {element.get_type_name(): datatype for datatype, element in _TYPES.items()}


@dataclass(frozen=True, slots=True)
class BatchSize:
    """Batch sizes that a compiled model accepts. `fixed`: the only one; 0: any. `padding`: smaller ones are padded."""

    fixed: int = 0
    padding: bool = False

    def pad(self, inputs: Arrays, rows: int) -> Arrays:
        """Return inputs with `fixed` rows, the last ones zeros. Raises `InternalError` without padding."""
        if not self.padding:
            raise InternalError(
                f"expected requests with batch size '{self.fixed}', got '{rows}'... this error can be avoided by "
                "setting 'ENABLE_BATCH_PADDING' parameter in model configuration to 'YES' at a performance cost"
            )
        padded = {}
        for name, array in inputs.items():
            rest = np.zeros((self.fixed - rows, *array.shape[1:]), array.dtype)
            padded[name] = np.concatenate([array, rest])
        return padded


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """A model on a device. Thread-safe, unlike its inference requests."""

    runtime: openvino.CompiledModel
    signature: ModelSignature
    batch: BatchSize


def compile_model(path: Path, config: Any, settings: Parameters) -> CompiledModel:
    """Read a model, give it the configured shapes and datatypes, and compile it. Raises `ServerError`."""
    core = openvino.Core()
    properties = _properties(config.name, settings)
    model = read_model(core, path, settings)
    use_configured_shapes(model, config, settings)
    # Names and shapes are checked first: the datatypes are only converted if these match.
    model = _with_configured_datatypes(model, config)
    signature = signature_of(model, config)
    check_config(config, signature)
    device = settings.get("TARGET_DEVICE", "CPU").upper()
    try:
        runtime = core.compile_model(model, device, properties)
    except RuntimeError as error:
        raise InternalError(
            f"unable to load model '{config.name}' on device '{device}' (available: "
            f"{', '.join(core.available_devices)}): {explain(error)}"
        ) from None
    return CompiledModel(runtime, signature, _batch_size(config, settings))


def read_model(core: openvino.Core, path: Path, settings: Parameters) -> openvino.Model:
    """Read a model file, or a directory such as a SavedModel. Raises `ServerError`."""
    if not path.exists():
        raise Unavailable(f"unable to find '{path}' for the model")
    try:
        if extension := settings.get("CPU_EXTENSION_PATH"):
            core.add_extension(extension)
        model = core.read_model(path)
    except RuntimeError as error:
        raise InternalError(f"openvino error: failed to load '{path.name}': {explain(error)}") from None
    for ports, prefix in ((model.inputs, "INPUT"), (model.outputs, "OUTPUT")):
        for index, port in enumerate(ports):
            if not port.names:
                port.get_tensor().add_names({f"{prefix}__{index}"})
    return model


def signature_of(model: openvino.Model, config: Any) -> ModelSignature:
    """Return inputs and outputs. The first dimension is -1 if the model batches: `use_configured_shapes` has set it."""
    return ModelSignature(
        _tensors(model.inputs, config.max_batch_size > 0), _tensors(model.outputs, config.max_batch_size > 0)
    )


def _tensors(ports: Iterable[Any], batches: bool) -> dict[str, ModelTensor]:
    tensors = {}
    for port in ports:
        shape = _shape(port)
        if batches and shape:
            shape = (-1, *shape[1:])
        element = port.element_type.get_type_name()
        tensors[port.any_name] = ModelTensor(port.any_name, element, _DATATYPES.get(element), shape)
    return tensors


def _shape(port: Any) -> tuple[int, ...] | None:
    partial = port.partial_shape
    if partial.rank.is_dynamic:
        return None
    return tuple(-1 if extent.is_dynamic else extent.get_length() for extent in partial)


def use_configured_shapes(model: openvino.Model, config: Any, settings: Parameters) -> None:
    """Set the batch dimension of a model that batches, and the configured `dims` with RESHAPE_IO_LAYERS.

    Without `max_batch_size`, the first dimension becomes dynamic if the model has layouts with a batch (N) in all
    inputs, and supports it. Raises `InvalidArgument`.
    """
    batch = _batch_size(config, settings).fixed or -1
    if config.max_batch_size:
        _reshape(model, config, settings, batch)
        for port in model.outputs:
            shape = _shape(port)
            if shape is not None and shape[:1] != (batch,):
                raise InvalidArgument(
                    f"unable to load model '{config.name}': output '{port.any_name}' has the shape "
                    f"{list(shape)} when the inputs have the batch size {'-1' if batch < 0 else batch}; set "
                    "max_batch_size to 0, or SKIP_OV_DYNAMIC_BATCHSIZE and the batch size of the model"
                )
    elif settings.boolean("RESHAPE_IO_LAYERS", False):
        _reshape(model, config, settings, None)
    elif model.inputs and all(_has_batch_layout(port) for port in model.inputs):
        shapes = {port: port.partial_shape for port in model.inputs}
        try:
            _reshape(model, config, settings, -1)
        except InvalidArgument as error:
            logger.info("model '%s' is not batched: %s", config.name, error.message)
            model.reshape(shapes)


def _has_batch_layout(port: Any) -> bool:
    layout = port.node.layout
    return bool(openvino.layout_helpers.has_batch(layout)) and openvino.layout_helpers.batch_idx(layout) == 0


def _reshape(model: openvino.Model, config: Any, settings: Parameters, batch: int | None) -> None:
    """Set the first dimension of all inputs, if given, and the others to `dims` with RESHAPE_IO_LAYERS."""
    configured = {}
    if settings.boolean("RESHAPE_IO_LAYERS", False):
        configured = {tensor.name: configured_dims(tensor) for tensor in config.input}
    shapes = {}
    for port in model.inputs:
        shape = _shape(port)
        name = next((name for name in port.names if name in configured), None)
        if name is not None:
            shape = (*(() if batch is None else (batch,)), *configured[name])
        elif shape and batch is not None:
            shape = (batch, *shape[1:])
        if shape is not None and shape != _shape(port):
            shapes[port] = openvino.PartialShape(list(shape))
    if not shapes:
        return
    try:
        model.reshape(shapes)
    except RuntimeError as error:
        wanted = ", ".join(f"{port.any_name} {shape}" for port, shape in shapes.items())
        raise InvalidArgument(
            f"unable to load model '{config.name}': the model cannot have inputs of the shape {wanted}: "
            f"{explain(error)}"
        ) from None


def _with_configured_datatypes(model: openvino.Model, config: Any) -> openvino.Model:
    """Insert conversions where a configured numeric datatype is not that of the model."""
    processor = PrePostProcessor(model)
    changed = False
    for tensors, ports, of in (
        (config.input, model.inputs, processor.input),
        (config.output, model.outputs, processor.output),
    ):
        found = {name: port.element_type for port in ports for name in port.names}
        for tensor in tensors:
            datatype = DataType.of_message(tensor)
            has = found.get(tensor.name)
            if has in (None, _TYPES.get(datatype), openvino.Type.string) or datatype is DataType.BYTES:
                continue
            of(tensor.name).tensor().set_element_type(_TYPES[datatype])
            changed = True
    if not changed:
        return model
    try:
        return processor.build()
    except RuntimeError as error:
        raise InvalidArgument(
            f"unable to load model '{config.name}' with the configured datatypes: {explain(error)}"
        ) from None


def _batch_size(config: Any, settings: Parameters) -> BatchSize:
    fixed = settings.boolean("SKIP_OV_DYNAMIC_BATCHSIZE", False)
    padding = settings.boolean("ENABLE_BATCH_PADDING", False)
    return BatchSize(config.max_batch_size if fixed or padding else 0, padding)


_OWN_PARAMETERS = {
    "CPU_EXTENSION_PATH",
    "ENABLE_BATCH_PADDING",
    "RESHAPE_IO_LAYERS",
    "SKIP_OV_DYNAMIC_BATCHSIZE",
    "TARGET_DEVICE",
}
_HINTS = ("LATENCY", "THROUGHPUT", "CUMULATIVE_THROUGHPUT")


def _properties(model: str, settings: Parameters) -> dict[str, str]:
    """Return the properties of the compiled model. Raises `InvalidArgument`.

    Parameters in capitals that are no parameters of the backend are properties of OpenVINO, which rejects unknown ones.
    """
    properties = {}
    for name, value in settings.items():
        if name in _OWN_PARAMETERS or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            continue
        text = value.strip().upper()
        expected = ""
        if name in ("INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS") and not text.isdecimal():
            expected = "a non-negative number"
        elif name == "NUM_STREAMS" and not (text in ("AUTO", "NUMA") or text.isdecimal()):
            expected = "AUTO, NUMA or a number"
        elif name == "PERFORMANCE_HINT" and text not in _HINTS:
            expected = f"one of {', '.join(_HINTS)}"
        elif name == "HINT_BF16" and text != "YES":
            expected = "YES"
        if expected:
            raise InvalidArgument(
                f"expected the parameter '{name}' of model '{model}' to be {expected}, got '{value}'"
            )
        if name == "HINT_BF16":
            properties["INFERENCE_PRECISION_HINT"] = "bf16"
        else:
            known = name in ("NUM_STREAMS", "PERFORMANCE_HINT")
            properties[name] = text if known else value
    return properties


def explain(error: RuntimeError) -> str:
    """Return the text of an exception of OpenVINO without the lines that name its source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from ", "Check '"))]
    return " ".join(kept) or str(error).strip()
