"""Datatypes by their numbers and names in model configurations, and the wire format of BYTES."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from neso.backends.python.errors import TritonModelException
from neso.server.errors import InvalidArgument
from neso.server.tensor import DataType, Tensor

# The numbers of `DataType` in model_config.proto, which is not there in a model's own environment.
_BY_NUMBER = dict(
    enumerate(
        (
            DataType.BOOL, DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.UINT64,
            DataType.INT8, DataType.INT16, DataType.INT32, DataType.INT64,
            DataType.FP16, DataType.FP32, DataType.FP64, DataType.BYTES, DataType.BF16,
        ),
        start=1,
    )
)  # fmt: skip
_NUMBER = {datatype: number for number, datatype in _BY_NUMBER.items()}


def triton_to_numpy_type(data_type: int) -> type[np.generic]:
    """The numpy type of a datatype's number."""
    return _BY_NUMBER[data_type].dtype.type


def numpy_to_triton_type(data_type: Any) -> int:
    """The number of a numpy type."""
    return int(_NUMBER[DataType.of_numpy(np.dtype(data_type))])


def triton_string_to_numpy(name: str) -> type[np.generic]:
    """The numpy type of a `TYPE_*` name."""
    try:
        return DataType.from_config(name).dtype.type
    except InvalidArgument as error:
        raise TritonModelException(error.message) from None


def serialize_byte_tensor(array: npt.NDArray[Any]) -> bytes | None:
    """The elements, each after its length; None for an array that is empty or not of strings."""
    if array.size == 0 or array.dtype.kind not in "SO":
        return None
    encoded = [element if isinstance(element, bytes) else str(element).encode() for element in array.flat]
    return b"".join(len(element).to_bytes(4, "little") + element for element in encoded)


def deserialize_bytes_tensor(data: bytes) -> npt.NDArray[Any]:
    """The elements that `serialize_byte_tensor` wrote, as a flat array of `bytes`."""
    count, offset = 0, 0
    while offset < len(data):
        offset += 4 + int.from_bytes(data[offset : offset + 4], "little")
        count += 1
    try:
        return Tensor.from_wire("", DataType.BYTES, (count,), data).array
    except InvalidArgument as error:
        raise TritonModelException(error.message) from None
