"""Datatypes and tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.errors import InvalidArgument, Unsupported

try:
    from neso._wire import split_strings
except ImportError:  # the process of a model with its own environment, for which the extension is not built

    def split_strings(data: bytes | memoryview, count: int) -> tuple[list[bytes], int]:
        """See `neso._wire`."""
        view, end = memoryview(data), 0
        found: list[bytes] = []
        while len(found) < count and end + 4 <= len(view):
            start = end + 4
            stop = start + int.from_bytes(view[end:start], "little")
            if stop > len(view):
                break
            found.append(bytes(view[start:stop]))
            end = stop
        return found, end


try:
    import ml_dtypes
except ImportError:  # Python models can run in an environment without ml_dtypes
    ml_dtypes = None  # type: ignore[assignment]


class DataType(str, Enum):
    """Element types of the KServe v2 protocol. BYTES elements are variable-length byte strings."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BF16 = "BF16"
    BYTES = "BYTES"

    dtype: np.dtype[Any]
    """The numpy dtype; object for BYTES, with `bytes` elements.

    Raises `Unsupported` for BF16 in an environment without the package ml_dtypes.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "dtype":
            raise Unsupported(f"{self.value} tensors need the package ml_dtypes in this Python environment")
        raise AttributeError(name)

    @property
    def itemsize(self) -> int | None:
        """Bytes per element; None for BYTES."""
        return None if self is DataType.BYTES else self.dtype.itemsize

    @property
    def config_name(self) -> str:
        """The name in config.pbtxt, TYPE_STRING for BYTES."""
        return "TYPE_STRING" if self is DataType.BYTES else f"TYPE_{self.value}"

    @classmethod
    def parse(cls, name: str, tensor: str) -> DataType:
        """Parse a KServe name. Raises `InvalidArgument`, whose message contains the tensor's name."""
        found = cls._value2member_map_.get(name)
        if found is None:
            raise InvalidArgument(
                f"unexpected datatype '{name}' for tensor '{tensor}', expected one of {', '.join(cls)}"
            )
        return found  # type: ignore[return-value]

    @classmethod
    def from_config(cls, name: str) -> DataType:
        """Parse a `TYPE_*` name. Raises `InvalidArgument`."""
        kserve = "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
        return cls.parse(kserve, "")

    @classmethod
    def of_message(cls, message: Any) -> DataType:
        """Return the `data_type` of a message of the model configuration. Raises `InvalidArgument`."""
        kinds = message.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
        return cls.from_config(kinds[message.data_type].name)

    @classmethod
    def of_numpy(cls, dtype: np.dtype[Any]) -> DataType:
        """Return the datatype of a numpy dtype; string, bytes and object dtypes are BYTES. Raises `InvalidArgument`."""
        if dtype.kind in "SUO":
            return cls.BYTES
        found = _FROM_NUMPY.get(dtype.newbyteorder("="))
        if found is None:
            raise InvalidArgument(f"numpy dtype {dtype} has no KServe datatype")
        return found


_NUMPY: dict[DataType, np.dtype[Any]] = {
    DataType.BOOL: np.dtype(np.bool_),
    DataType.UINT8: np.dtype(np.uint8),
    DataType.UINT16: np.dtype(np.uint16),
    DataType.UINT32: np.dtype(np.uint32),
    DataType.UINT64: np.dtype(np.uint64),
    DataType.INT8: np.dtype(np.int8),
    DataType.INT16: np.dtype(np.int16),
    DataType.INT32: np.dtype(np.int32),
    DataType.INT64: np.dtype(np.int64),
    DataType.FP16: np.dtype(np.float16),
    DataType.FP32: np.dtype(np.float32),
    DataType.FP64: np.dtype(np.float64),
    DataType.BYTES: np.dtype(np.object_),
}
if ml_dtypes is not None:
    _NUMPY[DataType.BF16] = np.dtype(ml_dtypes.bfloat16)
for _datatype, _dtype in _NUMPY.items():
    _datatype.dtype = _dtype
_FROM_NUMPY = {dtype: datatype for datatype, dtype in _NUMPY.items()}


class OwnedArray(np.ndarray[Any, Any]):
    """An array whose DLPack capsules keep `owner` alive."""

    owner: Any = None

    @classmethod
    def of(cls, array: npt.NDArray[Any], owner: Any) -> OwnedArray:
        """Return a view of the array."""
        view = array.view(cls)
        view.owner = owner
        return view


@dataclass(slots=True, eq=False)
class Tensor:
    """An immutable tensor. `array` is in C order; BYTES tensors are object arrays of `bytes`."""

    name: str
    datatype: DataType
    array: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def has_elements(self) -> bool:
        """False if a worker of a stage has the elements, and `array` only their shape and dtype."""
        return getattr(self.array, "has_elements", True)

    @property
    def byte_size(self) -> int:
        """Size in the binary tensor format, in bytes."""
        if self.datatype is DataType.BYTES:
            return sum(4 + len(element) for element in self.array.flat)
        return int(self.array.nbytes)

    @classmethod
    def from_numpy(cls, name: str, array: npt.ArrayLike) -> Tensor:
        """Wrap an array or a list; strings are encoded as UTF-8. Raises `InvalidArgument` for other dtypes."""
        array = np.asarray(array)
        datatype = DataType.of_numpy(array.dtype)
        if datatype is DataType.BYTES:
            array = _as_bytes_array(name, array)
        elif not array.flags.c_contiguous or not array.dtype.isnative:
            array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
        return cls(name, datatype, array)

    @classmethod
    def zeros(cls, name: str, datatype: DataType, shape: tuple[int, ...]) -> Tensor:
        """Create a tensor of zeros; BYTES elements are empty."""
        if datatype is DataType.BYTES:
            return cls(name, datatype, np.full(shape, b"", np.object_))
        return cls(name, datatype, np.zeros(shape, datatype.dtype))

    @classmethod
    def from_strings(cls, name: str, strings: list[str]) -> Tensor:
        """Create a BYTES tensor of shape [len(strings)]."""
        array = np.empty(len(strings), np.object_)
        array[:] = [text.encode() for text in strings]
        return cls(name, DataType.BYTES, array)

    @classmethod
    def from_wire(
        cls,
        name: str,
        datatype: DataType,
        shape: tuple[int, ...],
        data: bytes | memoryview,
        model: str = "",
        max_strings: int | None = None,
    ) -> Tensor:
        """Read the binary tensor format (little-endian, row-major; BYTES: uint32 length before each element).

        Fixed-size types are views of `data`, not copies. Raises `InvalidArgument` with Triton's message, which contains
        the name of the `model`, if the size does not match the shape, or if a BYTES tensor has more than `max_strings`
        elements.
        """
        count = element_count(shape, name)
        if datatype is DataType.BYTES:
            if max_strings is not None and count > max_strings:
                raise InvalidArgument(
                    f"expected at most {max_strings} string elements for inference input '{name}'{_of(model)}, "
                    f"got {count}"
                )
            return cls(name, datatype, _split_bytes(name, data, count, model).reshape(shape))
        dtype = datatype.dtype
        if len(data) != count * dtype.itemsize:
            raise InvalidArgument(
                f"input byte size mismatch for input '{name}'{_of(model)}. "
                f"Expected {count * dtype.itemsize}, got {len(data)}"
            )
        return cls(name, datatype, np.frombuffer(data, dtype).reshape(shape))

    def to_wire(self) -> bytes:
        """Convert to the binary tensor format (see `from_wire`)."""
        if self.datatype is not DataType.BYTES:
            return self.array.tobytes()
        parts: list[bytes] = []
        for element in self.array.flat:
            parts.append(len(element).to_bytes(4, "little"))
            parts.append(element)
        return b"".join(parts)

    def strings(self) -> list[str]:
        """Return the elements of a BYTES tensor as a flat list of strings. Raises `InvalidArgument` if not UTF-8."""
        try:
            return [element.decode() for element in self.array.flat]
        except UnicodeDecodeError:
            raise InvalidArgument(f"tensor '{self.name}' holds bytes that are not UTF-8") from None


MAX_DIMENSIONS = 32
"""Maximum number of dimensions of a tensor: that of numpy's iterators."""
_MAX_BYTES = 2**63 - 1


def element_count(shape: tuple[int, ...], name: str = "") -> int:
    """Return the number of elements of a shape, 1 for ().

    Raises `InvalidArgument` with the tensor's `name` for a shape that no array can have, even if it has no elements.
    """
    count = 1
    for extent in shape:
        count *= extent
    if not count or count > _MAX_BYTES or len(shape) > MAX_DIMENSIONS:
        _check_extents(shape, name)
    return count


def _check_extents(shape: tuple[int, ...], name: str) -> None:
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidArgument(
            f"invalid shape for input '{name}': it has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are supported"
        )
    itemsize = 8 if 0 in shape else 1  # numpy multiplies the other extents of an empty array
    if math.prod(extent or 1 for extent in shape) * itemsize > _MAX_BYTES:
        raise InvalidArgument(
            f"invalid shape for input '{name}': shape {list(shape)} causes total element count to exceed maximum size "
            f"of {_MAX_BYTES}"
        )


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


def _of(model: str) -> str:
    return f" for model '{model}'" if model else ""


def _split_bytes(name: str, data: bytes | memoryview, count: int, model: str) -> npt.NDArray[Any]:
    where = f"inference input '{name}'{_of(model)}"
    found, end = split_strings(data, count)
    if len(found) < count:
        raise InvalidArgument(f"expected {count} string elements for {where}, got {len(found)}")
    if end != len(data):
        raise InvalidArgument(
            f"unexpected number of string elements {count + 1} for {where}, expecting {count}"
        )
    elements = np.empty(count, np.object_)
    elements[:] = found
    return elements
