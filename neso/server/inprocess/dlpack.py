"""DLPack features that numpy lacks: bfloat16, and the memory location of tensors on other devices.

Declares only the leading part of DLPack's C structures; numpy and torch own and free the memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.server.errors import InvalidArgument
from neso.server.tensor import OwnedArray

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BFLOAT, _UINT = 4, 1  # DLDataTypeCode


class DLDeviceType(IntEnum):
    """The supported DLPack device types."""

    kDLCPU = 1
    kDLCUDA = 2
    kDLCUDAHost = 3


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# Offset of the DLTensor in the structure of a capsule, by capsule name.
_OFFSETS = {b"dltensor": 0, b"dltensor_versioned": 32}

_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory location and size of a tensor."""

    data_ptr: int
    device_type: int
    device_id: int
    size: int
    contiguous: bool


def describe(owner: Any) -> Memory:
    """Return the memory location of a DLPack object on any device. Raises `InvalidArgument`."""
    with _refusals("the object"):
        capsule = _capsule(owner)
        tensor = _tensor(capsule)
    shape = [tensor.shape[axis] for axis in range(tensor.ndim)]
    contiguous, expected = True, 1
    if tensor.strides:
        for axis in reversed(range(tensor.ndim)):
            contiguous &= shape[axis] == 1 or tensor.strides[axis] == expected
            expected *= shape[axis]
    count = math.prod(shape)
    return Memory(
        (tensor.data or 0) + tensor.byte_offset,
        tensor.device.type,
        tensor.device.id,
        count * ((tensor.dtype.bits * tensor.dtype.lanes + 7) // 8),
        contiguous or count == 0,
    )


def is_on_host(owner: Any) -> bool:
    """Return whether the CPU can read the object's memory."""
    device = getattr(owner, "__dlpack_device__", None)
    return device is None or int(device()[0]) in (DLDeviceType.kDLCPU, DLDeviceType.kDLCUDAHost)


def to_numpy(owner: Any, what: str = "the object") -> npt.NDArray[Any]:
    """Return an array that shares the memory of a host object. Raises `InvalidArgument` with `what` in its message."""
    try:
        return np.from_dlpack(owner)
    except (RuntimeError, BufferError, TypeError, AttributeError):
        pass  # may be bfloat16
    with _refusals(what):
        relabelled = _Relabelled(owner)
        array = np.from_dlpack(relabelled)
        return array.view(BFLOAT16) if relabelled.was_bfloat16 else array


def export(array: npt.NDArray[Any], owner: Any, **options: Any) -> Any:
    """Return the DLPack capsule of an array, which keeps `owner` alive; `options` as for `__dlpack__`."""
    is_bfloat16 = array.dtype == BFLOAT16
    exported = OwnedArray.of(array.view(np.uint16) if is_bfloat16 else array, owner)
    capsule = exported.__dlpack__(**options)
    if is_bfloat16:
        _tensor(capsule).dtype.code = _BFLOAT
    return capsule


class _Relabelled:
    """Exports bfloat16 elements as uint16, which numpy supports."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.was_bfloat16 = False

    def __dlpack__(self, **options: Any) -> Any:
        capsule = _capsule(self._owner, **options)
        dtype = _tensor(capsule).dtype
        self.was_bfloat16 = (dtype.code, dtype.bits) == (_BFLOAT, 16)
        if self.was_bfloat16:
            dtype.code = _UINT
        return capsule

    def __dlpack_device__(self) -> tuple[Any, Any]:
        device: tuple[Any, Any] = self._owner.__dlpack_device__()
        return device


def _capsule(owner: Any, **options: Any) -> Any:
    try:
        return owner.__dlpack__(**options)
    except TypeError:
        if not options:
            raise
        return owner.__dlpack__()  # implements the protocol without options


def _tensor(capsule: Any) -> _DLTensor:
    """Return the structure of a capsule, valid while the capsule exists."""
    name = _get_name(capsule)
    if name not in _OFFSETS:
        raise BufferError("the DLPack capsule was used already")
    return _DLTensor.from_address(_get_pointer(capsule, name) + _OFFSETS[name])


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, BufferError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{what} cannot be read through DLPack: {error}") from None
