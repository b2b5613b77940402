"""JSON codec compatible with Triton: bodies (NaN and Infinity are numbers), typed members, parameters and tensors.

Error messages follow Triton's.
"""

from __future__ import annotations

import json
import math
from array import array
from itertools import chain
from typing import Any

import numpy as np
import orjson

from neso._wire import count_json
from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import DataType, Tensor, element_count

_INT64_MAX = (1 << 63) - 1
_UINT64_MAX = (1 << 64) - 1
MAX_INLINE_VALUES = 100_000
"""Maximum number of values of a body that is parsed on the event loop."""
_MAX_DEPTH = 100
"""Nesting of the lists of a tensor that is rejected, as in Triton."""
_BINARY_ONLY = (DataType.FP16, DataType.BF16)
_FLOATS = (DataType.FP32, DataType.FP64)

# Type codes of `array.array`, which converts a list three times as fast as numpy and checks the range.
_ARRAY_TYPES = {
    DataType.FP32: "f",
    DataType.FP64: "d",
    DataType.UINT8: "B",
    DataType.UINT16: "H",
    DataType.UINT32: "I",
    DataType.UINT64: "Q",
    DataType.INT8: "b",
    DataType.INT16: "h",
    DataType.INT32: "i",
    DataType.INT64: "q",
}

# Allowed Python types of the elements, and the error message for other types.
_ELEMENT_TYPES: dict[DataType, tuple[frozenset[type], str]] = {
    DataType.BOOL: (frozenset({bool}), "attempt to access JSON non-boolean as boolean"),
    DataType.BYTES: (frozenset({str}), "attempt to access JSON non-string as string"),
    **dict.fromkeys(_FLOATS, (frozenset({int, float}), "attempt to access JSON non-number as double")),
    **dict.fromkeys(
        (DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64),
        (frozenset({int}), "attempt to access JSON non-unsigned-integer as unsigned-integer"),
    ),
    **dict.fromkeys(
        (DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64),
        (frozenset({int}), "attempt to access JSON non-signed-integer as signed-integer"),
    ),
}


def read_json(body: bytes | memoryview, max_values: int = MAX_INLINE_VALUES) -> Any:
    """Parse JSON. Raises `InvalidArgument`, also for more than `max_values` values."""
    # A parser holds the interpreter lock until it has created all of them.
    if len(body) > max_values and count_json(body, max_values)[0] > max_values:
        raise InvalidArgument(
            f"request JSON has more than {max_values} values. Please use the binary data format for large tensors"
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        text = bytes(body)
        if b"NaN" not in text and b"Infinity" not in text:
            raise InvalidArgument(_json_error(error)) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also for integers of more than 4,300 digits
        raise InvalidArgument(_json_error(error)) from None


def read_object(body: bytes | memoryview, max_values: int = MAX_INLINE_VALUES) -> dict[str, Any]:
    """Parse a JSON object. Raises `InvalidArgument`, also for more than `max_values` values."""
    value = read_json(body, max_values)
    if type(value) is not dict:
        raise InvalidArgument("failed to parse the request JSON buffer: expected a JSON object")
    return value


def write_json(value: Any) -> bytes:
    """Serialize a value to JSON."""
    text = orjson.dumps(value)
    if b"null" in text:  # orjson writes NaN and infinite numbers as null
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return text


def read_bool(name: str, value: Any) -> bool:
    """Check that a member is a boolean. Raises `InvalidArgument`."""
    if type(value) is not bool:
        raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-boolean as boolean")
    return value


def read_unsigned(name: str, value: Any) -> int:
    """Check that a member is an unsigned 64-bit integer. Raises `InvalidArgument`."""
    if type(value) is not int or not 0 <= value <= _UINT64_MAX:
        raise InvalidArgument(
            f"Unable to parse '{name}': attempt to access JSON non-unsigned-integer as unsigned-integer"
        )
    return value


def read_string(name: str, value: Any) -> str:
    """Check that a member is a string. Raises `InvalidArgument`."""
    if type(value) is not str:
        raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-string as string")
    return value


def read_object_member(name: str, value: Any) -> dict[str, Any]:
    """Check that a member is an object. Raises `InvalidArgument`."""
    if type(value) is not dict:
        raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-object as object")
    return value


def read_array_member(container: dict[str, Any], name: str) -> list[Any]:
    """Return a required member that is an array. Raises `InvalidArgument`."""
    if name not in container:
        raise InvalidArgument(
            f"Unable to parse '{name}': attempt to access non-existing object member '{name}'"
        )
    value = container[name]
    if type(value) is not list:
        raise InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-array as array")
    return value


def read_parameter(request: InferenceRequest, name: str, value: Any) -> None:
    """Set the request field of a protocol parameter, or an entry of `parameters`. Raises `InvalidArgument`."""
    if name == "sequence_id":
        request.sequence_id = value if type(value) is str else read_unsigned(name, value)
    elif name == "sequence_start":
        request.sequence_start = read_bool(name, value)
    elif name == "sequence_end":
        request.sequence_end = read_bool(name, value)
    elif name == "priority":
        request.priority = read_unsigned(name, value)
    elif name == "timeout":
        request.timeout_us = read_unsigned(name, value)
    elif name == "headers":
        raise InvalidArgument(
            "parameter key 'headers' is reserved for Triton usage and should not be specified."
        )
    elif name.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
        )
    elif type(value) not in (str, bool, int, float):
        raise InvalidArgument(
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', 'double', or 'string'."
        )
    else:
        request.parameters[name] = value


def read_tensor(name: str, datatype: DataType, shape: tuple[int, ...], data: list[Any]) -> Tensor:
    """Create a tensor from JSON `data`, flat or nested, in row-major order. Raises `InvalidArgument`."""
    if datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"receiving {datatype.value} data via JSON is not supported. Please use the binary data format for "
            f"input {name}"
        )
    flat = _flatten(name, data)
    allowed, message = _ELEMENT_TYPES[datatype]
    if not allowed.issuperset(map(type, flat)):
        raise _ragged(name) if list in map(type, flat) else _parse_error(name, message)
    count = element_count(shape, name)
    if len(flat) != count:
        itemsize = datatype.itemsize or 1
        if count * itemsize > _INT64_MAX:
            raise InvalidArgument(
                f"byte size overflow for input '{name}': element count ({count}) * data type size ({itemsize}) exceeds "
                f"maximum allowed size ({_INT64_MAX})"
            )
        raise InvalidArgument(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field, input '{name}' has "
            f"{len(flat)} elements, its shape {list(shape)}"
        )
    return Tensor(name, datatype, _array(name, datatype, flat).reshape(shape))


def write_values(tensor: Tensor, *, lossy: bool = False) -> list[Any]:
    """Return the elements as a flat list. Raises `InvalidArgument` for FP16 and BF16.

    Bytes that are not UTF-8 become U+FFFD if `lossy`, otherwise `InvalidArgument` is raised.
    """
    if tensor.datatype is DataType.FP16 or tensor.datatype is DataType.BF16:
        raise InvalidArgument(
            f"sending {tensor.datatype.value} data via JSON is not supported. Please use the binary data format "
            f"for output {tensor.name}"
        )
    if tensor.datatype is not DataType.BYTES:
        values: list[Any] = tensor.array.ravel().tolist()
        return values
    try:
        return [element.decode("utf-8", "replace" if lossy else "strict") for element in tensor.array.flat]
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"output {tensor.name} holds bytes that are not UTF-8. Please use the binary data format for it"
        ) from None


def _flatten(name: str, data: list[Any]) -> list[Any]:
    """Flatten nested lists level by level, without recursion. Raises `InvalidArgument` for ragged or too deep lists."""
    depth = 1
    while data and type(data[0]) is list:
        depth += 1
        if depth >= _MAX_DEPTH:
            raise InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({_MAX_DEPTH})")
        if set(map(type, data)) != {list} or len(set(map(len, data))) != 1:
            raise _ragged(name)
        data = list(chain.from_iterable(data))
    return data


def _array(name: str, datatype: DataType, flat: list[Any]) -> np.ndarray[Any, Any]:
    if datatype is DataType.BYTES:
        elements = np.empty(len(flat), np.object_)
        try:
            elements[:] = [text.encode() for text in flat]
        except UnicodeEncodeError:
            raise _parse_error(name, "attempt to read text that is not valid Unicode") from None
        return elements
    if datatype is DataType.BOOL:
        return np.array(flat, np.bool_)
    try:
        elements = np.frombuffer(array(_ARRAY_TYPES[datatype], flat), datatype.dtype)
    except OverflowError:
        raise _out_of_range(name, datatype) from None
    # Finite Python floats can overflow to infinity in FP32.
    if (
        datatype is DataType.FP32
        and not _all_finite(elements)
        and np.isinf(elements).sum() != _count_infinite(flat)
    ):
        raise _out_of_range(name, datatype)
    return elements


def _all_finite(elements: np.ndarray[Any, Any]) -> bool:
    # For few elements, counting bytes is five times as fast as `all`; for many, it is equally fast.
    return not np.isfinite(elements).tobytes().count(0)


def _count_infinite(flat: list[Any]) -> int:
    return flat.count(math.inf) + flat.count(-math.inf)


def _ragged(name: str) -> InvalidArgument:
    return InvalidArgument(f"Unable to parse 'data': input '{name}' has ragged nested lists")


def _parse_error(name: str, message: str) -> InvalidArgument:
    return InvalidArgument(f"Unable to parse 'data': {message}, input '{name}'")


def _out_of_range(name: str, datatype: DataType) -> InvalidArgument:
    return InvalidArgument(
        f"Unable to parse 'data': input '{name}' has a value out of range for {datatype.value}"
    )


def _json_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"failed to parse the request JSON buffer: {error.msg} at {error.pos}"
    return f"failed to parse the request JSON buffer: {error}"
