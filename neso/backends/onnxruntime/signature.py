"""Completion of a configuration from the model's signature, and check against the signature."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from neso.backends.onnxruntime.session import OnnxSignature, OnnxTensor
from neso.backends.tensor.model import output_names, server_inputs
from neso.server.errors import InternalError, InvalidArgument
from neso.server.signature import Shape
from neso.server.tensor import DataType

logger = logging.getLogger(__name__)


def needs_completion(config: Any) -> bool:
    """Return whether inputs or outputs are missing."""
    return not (config.input and config.output)


def complete_config(config: Any, signature: OnnxSignature, default_max_batch_size: int) -> None:
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


def _complete_batching(config: Any, signature: OnnxSignature, default_max_batch_size: int) -> None:
    tensors = [*signature.inputs.values(), *signature.outputs.values()]
    can_batch = all(tensor.shape[:1] == (-1,) for tensor in tensors if tensor.datatype is not None)
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


def _add_tensors(config: Any, messages: Any, tensors: Mapping[str, OnnxTensor], exclude: set[str]) -> None:
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


def check_config(config: Any, signature: OnnxSignature) -> None:
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


def _check_names(names: Iterable[str], known: Mapping[str, OnnxTensor], kind: str) -> None:
    for name in sorted(names):
        if name not in known:
            raise InvalidArgument(
                f"unexpected inference {kind} '{name}', allowed {kind}s are: {', '.join(known)}"
            )
        if known[name].datatype is None:
            raise InternalError(f"unsupported type {known[name].type} of {kind} '{name}', expected a tensor")


def _check_tensor(config: Any, tensor: Any, found: OnnxTensor, kind: str) -> None:
    _check_datatype(config, tensor, found, kind)
    if getattr(tensor, "allow_ragged_batch", False) or any(
        tensor.name in spec.target_name for spec in config.batch_output
    ):
        return  # the configured shape is not the shape passed to the model
    if config.max_batch_size or not is_scalar(tensor, found):
        dims = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else tuple(tensor.dims)
        _check_dims(config, tensor.name, dims, found.shape)


def is_scalar(tensor: Any, found: OnnxTensor) -> bool:
    """Return whether a tensor of the configuration has one element and no `reshape`, and is a scalar of the model."""
    return found.shape == () and not tensor.HasField("reshape") and set(tensor.dims) <= {1}


def _check_datatype(config: Any, tensor: Any, found: OnnxTensor, kind: str) -> None:
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
