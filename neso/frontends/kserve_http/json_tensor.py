"""Tensors as JSON."""

from __future__ import annotations

import math
from array import array
from itertools import chain
from typing import Any

import numpy as np

from neso.server.errors import InvalidArgument
from neso.server.tensor import DataType, Tensor, element_count

_NO_JSON = (DataType.FP16, DataType.BF16)
_FLOATS = (DataType.FP32, DataType.FP64)

# By the standard library's array: from a list it takes a third of the time of numpy's, and it checks the range.
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

# What the elements may be, and what the client is told of others.
_KINDS: dict[DataType, tuple[frozenset[type], str]] = {
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


def read_tensor(name: str, datatype: DataType, shape: tuple[int, ...], data: list[Any]) -> Tensor:
    """The tensor of `data`, flat or nested in any regular way, in row-major order. Raises `InvalidArgument`."""
    if datatype in _NO_JSON:
        raise InvalidArgument(
            f"receiving {datatype.value} data via JSON is not supported. Please use the binary data format for "
            f"input {name}"
        )
    flat = _flatten(name, data)
    allowed, message = _KINDS[datatype]
    if not allowed.issuperset(map(type, flat)):
        raise _ragged(name) if list in map(type, flat) else _unparsable(name, message)
    if len(flat) != element_count(shape):
        raise InvalidArgument(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field, input '{name}' has "
            f"{len(flat)} elements, its shape {list(shape)}"
        )
    return Tensor(name, datatype, _array(name, datatype, flat).reshape(shape))


def write_values(tensor: Tensor, *, lossy: bool = False) -> list[Any]:
    """The elements, flat. Raises `InvalidArgument` for datatypes that JSON does not carry.

    Bytes that are no UTF-8 are an error too, unless `lossy`: they become U+FFFD then.
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
    """Level by level: as fast as it gets in Python, and deep nesting needs no stack."""
    while data and type(data[0]) is list:
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
            raise _unparsable(name, "attempt to read text that is not valid Unicode") from None
        return elements
    if datatype is DataType.BOOL:
        return np.array(flat, np.bool_)
    try:
        elements = np.frombuffer(array(_ARRAY_TYPES[datatype], flat), datatype.dtype)
    except OverflowError:
        raise _out_of_range(name, datatype) from None
    # FP32 becomes infinite where Python's floats are not yet.
    if (
        datatype is DataType.FP32
        and not _all_finite(elements)
        and np.isinf(elements).sum() != _infinite(flat)
    ):
        raise _out_of_range(name, datatype)
    return elements


def _all_finite(elements: np.ndarray[Any, Any]) -> bool:
    # Counting bytes is as quick for many elements as `all`, and for a few it takes a fifth of the time.
    return not np.isfinite(elements).tobytes().count(0)


def _infinite(flat: list[Any]) -> int:
    return flat.count(math.inf) + flat.count(-math.inf)


def _ragged(name: str) -> InvalidArgument:
    return InvalidArgument(f"Unable to parse 'data': input '{name}' has ragged nested lists")


def _unparsable(name: str, message: str) -> InvalidArgument:
    return InvalidArgument(f"Unable to parse 'data': {message}, input '{name}'")


def _out_of_range(name: str, datatype: DataType) -> InvalidArgument:
    return InvalidArgument(
        f"Unable to parse 'data': input '{name}' has a value out of range for {datatype.value}"
    )
