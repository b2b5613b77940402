"""Signatures of model files: completion of a configuration from one, and checks of a configuration against one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neso.backends.tensor.model import Arrays, output_names, server_inputs
from neso.server.errors import InternalError, InvalidArgument
from neso.server.signature import Shape
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """An input or output of a model file.

    - type: type in the words of the framework, such as "tensor(float)"
    - datatype: None for unsupported types: non-tensors, and tensors of unsupported elements
    - shape: -1 for dynamic dimensions; None if the number of dimensions is unknown
    """

    name: str
    type: str
    datatype: DataType | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs of a model file by name. `optional`: inputs with default values."""

    inputs: dict[str, ModelTensor]
    outputs: dict[str, ModelTensor]
    optional: dict[str, ModelTensor] = field(default_factory=dict)


class Scalars:
    """Scalars of a model that are configured as tensors with one element and without `reshape`."""

    def __init__(self, config: Any, signature: ModelSignature) -> None:
        known = signature.inputs | signature.optional | signature.outputs
        self._dims = {
            tensor.name: tuple(tensor.dims)
            for tensor in [*config.input, *config.output]
            if _is_scalar(tensor, known[tensor.name])
        }

    def to_model(self, inputs: Arrays) -> Arrays:
        """Return the inputs in the shapes of the model."""
        return {name: a.reshape(()) if name in self._dims else a for name, a in inputs.items()}

    def from_model(self, outputs: Arrays) -> Arrays:
        """Return the outputs in the shapes of the configuration."""
        return {
            name: np.reshape(a, self._dims[name]) if name in self._dims else a for name, a in outputs.items()
        }


def needs_completion(config: Any) -> bool:
    """Return whether inputs or outputs are missing."""
    return not (config.input and config.output)


def complete_config(config: Any, signature: ModelSignature, default_max_batch_size: int) -> None:
    """Add inputs and outputs, and batching if the first dimension of all tensors is dynamic.

    Raises `InvalidArgument`.
    """
    _complete_batching(config, signature, default_max_batch_size)
    if not config.input:
        provided = set(server_inputs(config))
        _add_tensors(config, config.input, signature.inputs, provided)
        _add_tensors(config, config.input, signature.optional, provided)
        for tensor in config.input:
            if tensor.name in signature.optional:
                tensor.optional = True
    if not config.output:
        _add_tensors(
            config, config.output, signature.outputs, {s.output_name for s in config.sequence_batching.state}
        )


def _complete_batching(config: Any, signature: ModelSignature, default_max_batch_size: int) -> None:
    tensors = [*signature.inputs.values(), *signature.outputs.values()]
    shapes = [tensor.shape for tensor in tensors if tensor.datatype is not None]
    if not config.max_batch_size and _has_unbatched_dims(config, signature):
        return
    can_batch = all(shape is None or shape[:1] == (-1,) for shape in shapes) and any(shapes)
    if not can_batch:
        if config.max_batch_size:
            raise InvalidArgument(
                f"autofill failed for model '{config.name}': model does not support batching while non-zero "
                "max_batch_size is specified"
            )
        return
    if not config.max_batch_size:
        config.max_batch_size = max(default_max_batch_size, 0)
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _has_unbatched_dims(config: Any, signature: ModelSignature) -> bool:
    """Return whether a tensor is configured with all dimensions of the model, so that none is for a batch."""
    known = signature.inputs | signature.optional | signature.outputs
    shapes = [(t, known[t.name].shape) for t in [*config.input, *config.output] if t.name in known]
    return any(shape and len(configured_dims(t)) == len(shape) for t, shape in shapes)


def configured_dims(tensor: Any) -> Shape:
    """Return the dimensions that the model sees: the tensor's `reshape` if it has one, else its `dims`."""
    return tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def _add_tensors(config: Any, messages: Any, tensors: Mapping[str, ModelTensor], exclude: set[str]) -> None:
    for tensor in tensors.values():
        if tensor.name in exclude:
            continue
        if tensor.datatype is None:
            logger.warning(
                "model '%s': '%s' has the unsupported type %s and is left out of the configuration",
                config.name,
                tensor.name,
                tensor.type,
            )
            continue
        if tensor.shape is None:
            raise InvalidArgument(
                f"autofill failed for model '{config.name}': the model has no shape for tensor '{tensor.name}', "
                "configure its inputs and outputs"
            )
        message = messages.add()
        message.name = tensor.name
        message.data_type = (
            type(config)
            .DESCRIPTOR.file.enum_types_by_name["DataType"]
            .values_by_name[tensor.datatype.config_name]
            .number
        )
        dims = tensor.shape[1:] if config.max_batch_size else tensor.shape
        if not dims:  # dims must not be empty: clients send a scalar as a tensor with one element
            message.reshape.SetInParent()
        message.dims.extend(dims or (1,))


def check_config(config: Any, signature: ModelSignature) -> None:
    """Raise `ServerError`, with Triton's messages, if inputs or outputs do not match the model."""
    states = config.sequence_batching.state
    inputs = {tensor.name for tensor in config.input} | set(server_inputs(config))
    optional = {tensor.name for tensor in config.input if tensor.name in signature.optional}
    allowed = signature.inputs | signature.optional
    _check_names(inputs, allowed, "input")
    if len(inputs - optional) != len(signature.inputs):
        raise InvalidArgument(
            f"unable to load model '{config.name}', configuration expects {len(inputs - optional)} inputs, model "
            f"provides {len(signature.inputs)}: {', '.join(signature.inputs)}"
        )
    _check_names(output_names(config), signature.outputs, "output")
    for tensor in config.input:
        _check_tensor(config, tensor, allowed[tensor.name], "input")
    for tensor in config.output:
        _check_tensor(config, tensor, signature.outputs[tensor.name], "output")
    for state in states:
        _check_datatype(config, state, allowed[state.input_name], "input")
        _check_datatype(config, state, signature.outputs[state.output_name], "output")


def _check_names(names: Iterable[str], known: Mapping[str, ModelTensor], kind: str) -> None:
    for name in sorted(names):
        if name not in known:
            raise InvalidArgument(
                f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(known)}"
            )
        if known[name].datatype is None:
            raise InternalError(f"unsupported type {known[name].type} of {kind} '{name}', expected a tensor")


def _check_tensor(config: Any, tensor: Any, found: ModelTensor, kind: str) -> None:
    _check_datatype(config, tensor, found, kind)
    if getattr(tensor, "allow_ragged_batch", False) or any(
        tensor.name in spec.target_name for spec in config.batch_output
    ):
        return  # the configured shape is not the shape passed to the model
    if found.shape is None:
        return
    if config.max_batch_size or not _is_scalar(tensor, found):
        _check_dims(config, tensor.name, configured_dims(tensor), found.shape)


def _is_scalar(tensor: Any, found: ModelTensor) -> bool:
    """Return whether a tensor of the configuration has one element and no `reshape`, and is a scalar of the model."""
    return found.shape == () and not tensor.HasField("reshape") and set(tensor.dims) <= {1}


def _check_datatype(config: Any, tensor: Any, found: ModelTensor, kind: str) -> None:
    datatype = DataType.of_message(tensor)
    if datatype is not found.datatype:
        provided = found.datatype.config_name if found.datatype else found.type
        name = tensor.name if hasattr(tensor, "name") else getattr(tensor, f"{kind}_name")
        raise InvalidArgument(
            f"unable to load model '{config.name}', configuration expects datatype {datatype.config_name} for {kind} "
            f"'{name}', model provides {provided}"
        )


def _check_dims(config: Any, name: str, dims: Shape, shape: Shape) -> None:
    batches = config.max_batch_size > 0
    where = f"model '{config.name}', tensor '{name}': "
    if batches and shape[:1] != (-1,):
        raise InvalidArgument(
            f"{where}for the model to support batching the shape should have at least 1 dimension and the first "
            f"dimension must be -1; but shape expected by the model is {_format_shape(shape)}"
        )
    expected = (-1, *dims) if batches else dims
    fits = len(shape) == len(expected) and all(
        -1 in extents or extents[0] == extents[1] for extents in zip(expected, shape, strict=True)
    )
    if not fits:
        explanation = (
            "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making "
            "complete shape"
            if batches
            else "shape"
        )
        raise InvalidArgument(
            f"{where}the model expects {len(shape)} dimensions (shape {_format_shape(shape)}) but the model "
            f"configuration specifies {len(expected)} dimensions ({explanation} {_format_shape(expected)})"
        )


def _format_shape(shape: Shape) -> str:
    return "[" + ",".join(str(extent) for extent in shape) + "]"
