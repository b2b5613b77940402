"""`pb_utils.Tensor`, conversions between datatypes and numpy types, and DLPack."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.backends.python.arguments import as_text
from neso.backends.python.errors import TritonModelException
from neso.server.errors import InvalidArgument
from neso.server.tensor import DataType, OwnedArray
from neso.server.tensor import Tensor as ServerTensor


class Tensor:
    """A named numpy array. BYTES tensors are object arrays; elements of inputs are `bytes`."""

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str | bytes, array: npt.NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor '{name}' must be made from a numpy array, got {type(array).__name__}")
        if type(name) is not str or not name:
            name = _checked_name(name)
        self._name = name
        self._array = array
        datatype = _DATATYPES.get(array.dtype)
        self._datatype = _datatype_of(name, array) if datatype is None else datatype

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        """Return the array. Read-only views of the request are copied first, because models can write to them."""
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def triton_dtype(self) -> int:
        """Return the number of the datatype in model_config.proto."""
        return numpy_to_triton_type(self._datatype.dtype.type)

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Return True: the server's tensors are always in CPU memory."""
        return True

    def to_dlpack(self) -> Any:
        """Return a DLPack capsule that shares the memory and keeps the tensor alive."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """Create from a DLPack capsule, or an object with `__dlpack__`, sharing its memory."""
        name = _checked_name(name)
        try:
            return Tensor(name, _array_from_dlpack(tensor))
        except (RuntimeError, BufferError, TypeError, ValueError) as error:
            raise TritonModelException(f"Tensor '{name}' cannot be made from DLPack: {error}") from None

    def __dlpack__(self, **options: Any) -> Any:
        """Return a DLPack capsule that shares the memory. Raises `TritonModelException` for BYTES."""
        if self._datatype is DataType.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return _export_dlpack(self.as_numpy(), self, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU, 0

    @classmethod
    def from_server(cls, tensor: ServerTensor) -> Tensor:
        """Wrap a tensor of a request."""
        wrapped = cls.__new__(cls)
        wrapped._name, wrapped._datatype, wrapped._array = tensor.name, tensor.datatype, tensor.array
        return wrapped

    def to_server(self) -> ServerTensor:
        """Convert to the server's tensor. Elements of object arrays that are not `bytes` are converted by `str`."""
        array = self._array
        if self._datatype is not DataType.BYTES:
            if array.flags.c_contiguous and array.dtype.isnative:
                return ServerTensor(self._name, self._datatype, array)
            return ServerTensor.from_numpy(self._name, array)
        elements = np.empty(self._array.shape, np.object_)
        flat = elements.reshape(-1)
        for i, element in enumerate(self._array.flat):
            flat[i] = element if isinstance(element, bytes) else str(element).encode()
        return ServerTensor(self._name, DataType.BYTES, elements)


def _checked_name(name: Any) -> str:
    text = as_text(name, "name")
    if not text:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return text


# Cache: DataType.of_numpy takes longer than the rest of Tensor.__init__.
_DATATYPES: dict[np.dtype[Any], DataType] = {}


def _datatype_of(name: str, array: npt.NDArray[Any]) -> DataType:
    try:
        datatype = DataType.of_numpy(array.dtype)
    except InvalidArgument as error:
        raise TritonModelException(f"Tensor '{name}': {error.message}") from None
    if len(_DATATYPES) < 256:  # numpy strings have a separate dtype for each length
        _DATATYPES[array.dtype] = datatype
    return datatype


# Numbers of `DataType` in model_config.proto. The generated module may be missing in a model's environment.
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
    """Return the numpy type of a datatype number."""
    return _BY_NUMBER[data_type].dtype.type


def numpy_to_triton_type(data_type: Any) -> int:
    """Return the datatype number of a numpy type."""
    return int(_NUMBER[DataType.of_numpy(np.dtype(data_type))])


TRITON_STRING_TO_NUMPY: dict[str, type[Any]] = {
    datatype.config_name: bool if datatype is DataType.BOOL else datatype.dtype.type
    for datatype in DataType
    if datatype is not DataType.BF16  # no numpy type: absent in Triton, too
}


def triton_string_to_numpy(name: str) -> type[np.generic]:
    """Return the numpy type of a `TYPE_*` name."""
    try:
        return DataType.from_config(name).dtype.type
    except InvalidArgument as error:
        raise TritonModelException(error.message) from None


def serialize_byte_tensor(array: npt.NDArray[Any]) -> bytes | None:
    """Return the elements with 4-byte length prefixes; None for an array without strings."""
    if array.size == 0:
        return b""
    if array.dtype.kind not in "SO":
        return None
    encoded = [element if isinstance(element, bytes) else str(element).encode() for element in array.flat]
    return b"".join(len(element).to_bytes(4, "little") + element for element in encoded)


def deserialize_bytes_tensor(data: bytes) -> npt.NDArray[Any]:
    """Invert `serialize_byte_tensor`. Returns a flat object array of `bytes`."""
    count, offset = 0, 0
    while offset < len(data):
        offset += 4 + int.from_bytes(data[offset : offset + 4], "little")
        count += 1
    try:
        return ServerTensor.from_wire("", DataType.BYTES, (count,), data).array
    except InvalidArgument as error:
        raise TritonModelException(error.message) from None


_DLPACK_CPU, _DLPACK_CUDA_HOST = 1, 3  # DLDeviceType values in host memory
_UINT, _BFLOAT = 1, 4  # DLDataTypeCode


class _DLPackDtype(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLPackTensor(ctypes.Structure):
    """The first fields of a DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLPackDtype),
    )


def _export_dlpack(array: npt.NDArray[Any], owner: Tensor, **options: Any) -> Any:
    """Return a DLPack capsule that shares the array's memory. numpy itself does not support bfloat16."""
    if DataType.of_numpy(array.dtype) is not DataType.BF16:
        return OwnedArray.of(array, owner).__dlpack__(**options)
    capsule = OwnedArray.of(array.view(np.uint16), owner).__dlpack__()
    _dlpack_dtype(capsule).code = _BFLOAT
    return capsule


def _array_from_dlpack(source: Any) -> npt.NDArray[Any]:
    """Return an array that shares the memory of a DLPack capsule, or of an object with `__dlpack__`.

    Raises `BufferError`, `RuntimeError`, `TypeError`, `ValueError`.
    """
    if hasattr(source, "__dlpack__"):
        device = int(source.__dlpack_device__()[0])
        if device not in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
            raise BufferError(f"its memory is on a device (DLPack device type {device}), not the CPU's")
        if not str(getattr(source, "dtype", "")).endswith("bfloat16"):
            return np.from_dlpack(source)
        source = source.__dlpack__()
    if type(source).__name__ != "PyCapsule":
        raise TypeError(
            f"expected a DLPack capsule or an object with __dlpack__, got {type(source).__name__}"
        )
    dtype = _dlpack_dtype(source)
    if dtype.code != _BFLOAT or dtype.bits != 16:
        return _writable_view(np.from_dlpack(_DLPackSource(source)))
    dtype.code = _UINT
    return _writable_view(np.from_dlpack(_DLPackSource(source))).view(DataType.BF16.dtype)


def _dlpack_dtype(capsule: Any) -> _DLPackDtype:
    """Return the element type in a capsule, which can be modified. Raises `ValueError` for a consumed capsule."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLPackTensor.from_address(pointer(capsule, b"dltensor"))
    dtype: _DLPackDtype = tensor.dtype
    return dtype


def _writable_view(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a writable view. numpy imports bare capsules as read-only, but models can write to them."""
    return np.asarray(_WritableBuffer(array))


class _WritableBuffer:
    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._owner = array
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.__array_interface__["data"][0], False),
        }


class _DLPackSource:
    """Wraps a bare capsule with the methods that `np.from_dlpack` requires."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CPU, 0
