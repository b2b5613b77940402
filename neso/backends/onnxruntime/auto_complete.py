"""What a configuration leaves out, from the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from neso.backends.onnxruntime.session import OnnxSignature, OnnxTensor
from neso.server.errors import InvalidArgument

logger = logging.getLogger(__name__)


def is_needed(config: Any) -> bool:
    """Whether inputs or outputs are left out."""
    return not (config.input and config.output)


def complete(config: Any, signature: OnnxSignature, default_max_batch_size: int) -> None:
    """Add inputs and outputs, and batching where every tensor's first dimension varies. Raises `InvalidArgument`."""
    _complete_batching(config, signature, default_max_batch_size)
    if not config.input:
        # Control inputs, states and batch inputs are the server's to give.
        given = {tensor.name for tensor in config.sequence_batching.control_input}
        given.update(state.input_name for state in config.sequence_batching.state)
        given.update(name for spec in config.batch_input for name in spec.target_name)
        _add(config, config.input, signature.inputs, given)
        _add(config, config.input, signature.optional, given)
        for tensor in config.input:
            if tensor.name in signature.optional:
                tensor.optional = True
    if not config.output:
        _add(
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


def _add(config: Any, messages: Any, tensors: Mapping[str, OnnxTensor], given: set[str]) -> None:
    for tensor in tensors.values():
        if tensor.name in given:
            continue
        if tensor.datatype is None:
            logger.warning(
                "model '%s': '%s' is %s and not a tensor that can be sent, it is left out",
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
        if not dims:  # dims must not be empty: clients send one element for what has no dimension
            message.reshape.SetInParent()
        message.dims.extend(dims or (1,))
