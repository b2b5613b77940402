"""A named tensor of a request or a response, over numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.datatypes import DataType
from neso.server.errors import InvalidArgument


@dataclass(slots=True, eq=False)
class Tensor:
    """`array` holds the elements in C order; BYTES tensors are object arrays of `bytes`. Not changed once made."""

    name: str
    datatype: DataType
    array: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def byte_size(self) -> int:
        """Bytes on the wire, in the binary tensor format."""
        if self.datatype is DataType.BYTES:
            return sum(4 + len(element) for element in self.array.flat)
        return int(self.array.nbytes)

    @classmethod
    def from_numpy(cls, name: str, array: npt.ArrayLike) -> Tensor:
        """Wrap an array or a list; strings become UTF-8 bytes. Raises `InvalidArgument` for other dtypes."""
        array = np.asarray(array)
        datatype = DataType.of_numpy(array.dtype)
        if datatype is DataType.BYTES:
            array = _as_bytes_array(name, array)
        elif not array.flags.c_contiguous or not array.dtype.isnative:
            array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return cls(name, datatype, array)

    @classmethod
    def zeros(cls, name: str, datatype: DataType, shape: tuple[int, ...]) -> Tensor:
        """Of zeros; BYTES elements are empty."""
        if datatype is DataType.BYTES:
            return cls(name, datatype, np.full(shape, b"", np.object_))
        return cls(name, datatype, np.zeros(shape, datatype.dtype))

    @classmethod
    def from_strings(cls, name: str, strings: list[str]) -> Tensor:
        """A BYTES tensor of shape [len(strings)]."""
        array = np.empty(len(strings), np.object_)
        array[:] = [text.encode() for text in strings]
        return cls(name, DataType.BYTES, array)

    @classmethod
    def from_wire(
        cls, name: str, datatype: DataType, shape: tuple[int, ...], data: bytes | memoryview
    ) -> Tensor:
        """Read the binary tensor format (little-endian, row-major; BYTES: uint32 length before each element).

        Fixed-size types are views of `data`, not copies. Raises `InvalidArgument` when the sizes disagree.
        """
        count = element_count(shape)
        if datatype is DataType.BYTES:
            return cls(name, datatype, _split_bytes(name, data, count).reshape(shape))
        dtype = datatype.dtype
        if len(data) != count * dtype.itemsize:
            raise InvalidArgument(
                f"unexpected total byte size {len(data)} for input '{name}', "
                f"expecting {count * dtype.itemsize}"
            )
        return cls(name, datatype, np.frombuffer(data, dtype).reshape(shape))

    def to_wire(self) -> bytes:
        """The binary tensor format of `from_wire`."""
        if self.datatype is not DataType.BYTES:
            return self.array.tobytes()
        parts: list[bytes] = []
        for element in self.array.flat:
            parts.append(len(element).to_bytes(4, "little"))
            parts.append(element)
        return b"".join(parts)

    def strings(self) -> list[str]:
        """The elements of a BYTES tensor as text, flat. Raises `InvalidArgument` if they are no UTF-8."""
        try:
            return [element.decode() for element in self.array.flat]
        except UnicodeDecodeError:
            raise InvalidArgument(f"tensor '{self.name}' holds bytes that are not UTF-8") from None


def element_count(shape: tuple[int, ...]) -> int:
    """Number of elements of a shape, 1 for ()."""
    count = 1
    for extent in shape:
        count *= extent
    return count


def _as_bytes_array(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    result = np.empty(array.shape, np.object_)
    flat = result.reshape(-1) if result.ndim else result.reshape(1)
    for i, element in enumerate(array.flat):
        if isinstance(element, str):
            element = element.encode()
        elif not isinstance(element, bytes):
            raise InvalidArgument(
                f"element {i} of BYTES tensor '{name}' is {type(element).__name__}, expected text or bytes"
            )
        flat[i] = element
    return result


def _split_bytes(name: str, data: bytes | memoryview, count: int) -> npt.NDArray[Any]:
    view = memoryview(data)
    if count > len(view) // 4:
        raise InvalidArgument(
            f"expected {count} string elements for input '{name}', got {len(view)} bytes, "
            "too few for their lengths"
        )
    elements = np.empty(count, np.object_)
    offset = 0
    for i in range(count):
        end = offset + 4 + int.from_bytes(view[offset : offset + 4], "little")
        if offset + 4 > len(view) or end > len(view):
            raise InvalidArgument(
                f"incomplete string data for input '{name}', expecting {count} elements, got {i}"
            )
        elements[i] = bytes(view[offset + 4 : end])
        offset = end
    if offset != len(view):
        raise InvalidArgument(
            f"unexpected {len(view) - offset} bytes after the {count} elements of input '{name}'"
        )
    return elements
