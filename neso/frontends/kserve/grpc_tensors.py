"""Parameters, tensors and shared memory references of the protobuf messages."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest, ParameterValue
from neso.server.shared_memory.regions import BYTE_SIZE, OFFSET, REGION, SharedMemory, SharedMemoryWindow
from neso.server.tensor import DataType, Tensor, element_count

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"

_INT64_MAX = 2**63 - 1
_PARAMETER_FIELDS = {
    bool: ("bool_param",),
    int: ("int64_param", "uint64_param"),
    str: ("string_param",),
}

# Field of InferTensorContents for each datatype. FP16 and BF16 have none and need raw contents.
_CONTENTS_FIELDS = {
    DataType.BOOL: "bool_contents",
    DataType.INT8: "int_contents",
    DataType.INT16: "int_contents",
    DataType.INT32: "int_contents",
    DataType.INT64: "int64_contents",
    DataType.UINT8: "uint_contents",
    DataType.UINT16: "uint_contents",
    DataType.UINT32: "uint_contents",
    DataType.UINT64: "uint64_contents",
    DataType.FP32: "fp32_contents",
    DataType.FP64: "fp64_contents",
    DataType.BYTES: "bytes_contents",
}

_PIECE = 32 << 10  # elements that are converted at once

SharedTensors = dict[str, SharedMemoryWindow]
"""Locations of tensors in shared memory, by tensor name."""


@dataclass(slots=True)
class OutputOptions:
    """Response options requested by a client.

    `shared`: outputs to write to shared memory. `empty_final_response`: a stream ends with an empty final response.
    """

    shared: SharedTensors = field(default_factory=dict)
    empty_final_response: bool = False


def read_parameters(parameters: Mapping[str, Any], request: InferenceRequest, output: OutputOptions) -> None:
    """Set the fields of `request` and `output` for `InferParameter` messages. Raises `InvalidArgument`."""
    for key, parameter in parameters.items():
        if key == "sequence_id":
            request.sequence_id = _typed(key, parameter, int, str)
        elif key == "sequence_start":
            request.sequence_start = _typed(key, parameter, bool)
        elif key == "sequence_end":
            request.sequence_end = _typed(key, parameter, bool)
        elif key == "priority":
            request.priority = _not_negative(key, _typed(key, parameter, int))
        elif key == "timeout":
            request.timeout_us = _not_negative(key, _typed(key, parameter, int))
        elif key == EMPTY_FINAL_RESPONSE:
            output.empty_final_response = _typed(key, parameter, bool)
        elif key.startswith("triton_"):
            raise InvalidArgument(
                f"parameter '{key}': keys starting with 'triton_' are reserved, "
                f"only '{EMPTY_FINAL_RESPONSE}' is allowed"
            )
        else:
            request.parameters[key] = _value(key, parameter)


def write_parameters(target: MutableMapping[str, Any], parameters: Mapping[str, ParameterValue]) -> None:
    """Write parameters to the `parameters` map of a message."""
    for key, value in parameters.items():
        if isinstance(value, bool):  # a subclass of int
            target[key].bool_param = value
        elif isinstance(value, int):
            if value > _INT64_MAX:
                target[key].uint64_param = value
            else:
                target[key].int64_param = value
        elif isinstance(value, float):
            target[key].double_param = value
        else:
            target[key].string_param = value


def read_inputs(
    message: Any, raw: Sequence[bytes], shared: SharedTensors, max_strings: int
) -> dict[str, Tensor]:
    """Read the inputs of a `ModelInferRequest`, by name. Raises `InvalidArgument` naming the input.

    Tensors of fixed-size datatypes are read-only views of the `raw` bytes or of shared memory. `max_strings`: limit on
    the elements of a BYTES tensor there.
    """
    expected = len(message.inputs) - len(shared)
    if raw and len(raw) != expected:
        _reject_mixed_contents(message)
        raise InvalidArgument(
            f"expected as many raw_input_contents as inputs for model '{message.model_name}', "
            f"got {len(raw)} for {expected} inputs"
        )
    inputs: dict[str, Tensor] = {}
    raw_contents = iter(raw)
    for wire in message.inputs:
        name = wire.name
        if name in inputs:
            raise InvalidArgument(f"input '{name}' already exists in request")
        datatype = DataType.parse(wire.datatype, name)
        shape = tuple(wire.shape)
        if shape and min(shape) < 0:
            raise InvalidArgument(f"input '{name}' has a negative dimension in its shape {list(shape)}")
        if name in shared:
            inputs[name] = shared[name].read(name, datatype, shape, max_strings, message.model_name)
        elif not raw:
            inputs[name] = _from_contents(name, datatype, shape, wire)
        elif wire.HasField("contents"):
            _reject_mixed_contents(message)
        else:
            inputs[name] = Tensor.from_wire(
                name, datatype, shape, next(raw_contents), message.model_name, max_strings
            )
    return inputs


def read_shared_inputs(message: Any, shared_memory: SharedMemory) -> SharedTensors:
    """Read inputs from shared memory. Raises `ServerError`, also for an input that has `contents` as well."""
    shared: SharedTensors = {}
    for wire in message.inputs:
        if not wire.parameters or REGION not in wire.parameters:
            continue
        if wire.HasField("contents"):
            raise InvalidArgument(
                f"contents field must not be specified when using shared memory for '{wire.name}' "
                f"for model '{message.model_name}'"
            )
        if wire.name in shared:
            raise InvalidArgument(f"input '{wire.name}' already exists in request")
        shared[wire.name] = _read_shared(wire, shared_memory)
    return shared


def read_outputs(
    message: Any, request: InferenceRequest, output: OutputOptions, shared_memory: SharedMemory
) -> None:
    """Set the requested outputs with their classification and shared memory. Raises `ServerError`."""
    names = []
    for wire in message.outputs:
        name = wire.name
        names.append(name)
        parameters = wire.parameters
        if not parameters:
            continue
        if REGION in parameters:
            output.shared[name] = _read_shared(wire, shared_memory)
        if "classification" in parameters:
            parameter = parameters["classification"]
            if parameter.WhichOneof("parameter_choice") != "int64_param" or parameter.int64_param < 0:
                raise InvalidArgument(
                    "invalid value type for 'classification' parameter, expected int64_param that is not "
                    f"negative, for output '{name}'"
                )
            if REGION in parameters:
                raise InvalidArgument(f"output '{name}' cannot be classified and written to shared memory")
            if parameter.int64_param:
                request.classification[name] = parameter.int64_param
    request.requested_outputs = tuple(names)


def _read_shared(wire: Any, shared_memory: SharedMemory) -> SharedMemoryWindow:
    shared_memory.check_enabled()
    region = wire.parameters[REGION]
    if region.WhichOneof("parameter_choice") != "string_param":
        raise InvalidArgument(f"invalid value type for '{REGION}' parameter, expected string_param.")
    if BYTE_SIZE not in wire.parameters:
        raise InvalidArgument(f"'{BYTE_SIZE}' is missing, '{wire.name}' is in shared memory")
    offset = _read_size(OFFSET, wire.parameters[OFFSET]) if OFFSET in wire.parameters else 0
    byte_size = _read_size(BYTE_SIZE, wire.parameters[BYTE_SIZE])
    return shared_memory.window(region.string_param, offset, byte_size)


def _read_size(key: str, parameter: Any) -> int:
    return _not_negative(key, int(_typed(key, parameter, int)))


def _from_contents(name: str, datatype: DataType, shape: tuple[int, ...], wire: Any) -> Tensor:
    """Create a tensor from the typed `contents` of an input."""
    field_name = _CONTENTS_FIELDS.get(datatype)
    if field_name is None:
        raise InvalidArgument(f"input '{name}' has datatype {datatype.value}, which needs raw_input_contents")
    elements = getattr(wire.contents, field_name)
    count = element_count(shape, name)
    if len(elements) != count:
        others = [each.name for each, _ in wire.contents.ListFields() if each.name != field_name]
        hint = f"; its {', '.join(others)} cannot hold {datatype.value}" if others else ""
        raise InvalidArgument(
            f"unexpected number of elements {len(elements)} in {field_name} for input '{name}', "
            f"expecting {count}{hint}"
        )
    return Tensor(name, datatype, _array(name, datatype, elements, count).reshape(shape))


def _array(name: str, datatype: DataType, elements: Any, count: int) -> npt.NDArray[Any]:
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
    else:
        array = np.empty(count, datatype.dtype)
    try:
        # In pieces, so that other threads get the interpreter lock.
        for start in range(0, count, _PIECE):
            piece = elements[start : start + _PIECE]
            array[start : start + _PIECE] = (
                piece if datatype is DataType.BYTES else np.fromiter(piece, datatype.dtype, len(piece))
            )
        return array
    except OverflowError:
        raise InvalidArgument(
            f"an element of input '{name}' is out of the range of {datatype.value}"
        ) from None


def _reject_mixed_contents(message: Any) -> None:
    for wire in message.inputs:
        if wire.HasField("contents"):
            raise InvalidArgument(
                "contents field must not be specified when using raw_input_contents for "
                f"'{wire.name}' for model '{message.model_name}'"
            )


def _value(key: str, parameter: Any) -> ParameterValue:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgument(
            f"invalid value type for '{key}' parameter, expected bool_param, int64_param, uint64_param, "
            "double_param or string_param."
        )
    return getattr(parameter, kind)  # type: ignore[no-any-return]


def _typed(key: str, parameter: Any, *types: type) -> Any:
    expected = [kind for each in types for kind in _PARAMETER_FIELDS[each]]
    kind = parameter.WhichOneof("parameter_choice")
    if kind not in expected:
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {' or '.join(expected)}.")
    return getattr(parameter, kind)


def _not_negative(key: str, value: int) -> int:
    if value < 0:
        raise InvalidArgument(f"parameter '{key}' must not be negative, got {value}")
    return value
