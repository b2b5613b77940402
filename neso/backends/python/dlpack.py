"""DLPack for numpy arrays, with bfloat16, which numpy itself cannot exchange."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.tensor import DataType

CPU, CUDA_HOST = 1, 3  # DLDeviceType, what a CPU can read
_UINT, _BFLOAT = 1, 4  # DLDataTypeCode


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _ManagedTensor(ctypes.Structure):
    """The start of a DLManagedTensor, up to what is changed here."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
    )


def export(array: npt.NDArray[Any], **options: Any) -> Any:
    """A capsule that shares the array's memory."""
    if DataType.of_numpy(array.dtype) is not DataType.BF16:
        return array.__dlpack__(**options)
    capsule = array.view(np.uint16).__dlpack__()
    _describe(capsule).code = _BFLOAT
    return capsule


def load(source: Any) -> npt.NDArray[Any]:
    """An array that shares the memory of a capsule, or of an object with `__dlpack__`.

    Raises what numpy does: `BufferError`, `RuntimeError`, `TypeError`, `ValueError`.
    """
    if hasattr(source, "__dlpack__"):
        device = int(source.__dlpack_device__()[0])
        if device not in (CPU, CUDA_HOST):
            raise BufferError(f"its memory is on a device (DLPack device type {device}), not the CPU's")
        if not str(getattr(source, "dtype", "")).endswith("bfloat16"):
            return np.from_dlpack(source)
        source = source.__dlpack__()
    if type(source).__name__ != "PyCapsule":
        raise TypeError(
            f"expected a DLPack capsule or an object with __dlpack__, got {type(source).__name__}"
        )
    dtype = _describe(source)
    if dtype.code != _BFLOAT or dtype.bits != 16:
        return _writable(np.from_dlpack(_Capsule(source)))
    dtype.code = _UINT
    return _writable(np.from_dlpack(_Capsule(source))).view(DataType.BF16.dtype)


def _describe(capsule: Any) -> _DataType:
    """The element type in a capsule, to be read or changed. Raises `ValueError` for one that was used."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _ManagedTensor.from_address(pointer(capsule, b"dltensor"))
    dtype: _DataType = tensor.dtype
    return dtype


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What numpy makes of a capsule is read-only, as such a capsule cannot say; Triton's models may write."""
    return np.asarray(_Memory(array))


class _Memory:
    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._owner = array
        self.__array_interface__ = {
            **array.__array_interface__,
            "data": (array.__array_interface__["data"][0], False),
        }


class _Capsule:
    """Gives a bare capsule the methods that numpy asks for."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0
