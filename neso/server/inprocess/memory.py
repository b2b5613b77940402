"""Where tensors lie: kinds of memory, their names, and buffers in them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from neso.server.errors import InvalidArgument
from neso.server.inprocess import dlpack
from neso.server.inprocess.dlpack import DLDeviceType


class MemoryType(IntEnum):
    """Kinds of memory by Triton's numbers."""

    CPU = 0
    CPU_PINNED = 1
    GPU = 2


Device = str | MemoryType | tuple[MemoryType, int] | tuple[DLDeviceType, int]
"""`"cpu"`, `"gpu"`, `"gpu:1"`, `MemoryType.GPU`, `(MemoryType.GPU, 1)` or `(DLDeviceType.kDLCUDA, 1)`."""

_OF_DLPACK = {
    DLDeviceType.kDLCPU: MemoryType.CPU,
    DLDeviceType.kDLCUDA: MemoryType.GPU,
    DLDeviceType.kDLCUDAHost: MemoryType.CPU_PINNED,
}


def memory_type(device_type: int) -> MemoryType:
    """Of a device by DLPack's number. Raises `InvalidArgument` for devices that are not served."""
    found = _OF_DLPACK.get(device_type)  # type: ignore[call-overload]
    if found is None:
        raise InvalidArgument(f"DLPack device type {int(device_type)} is not supported")
    return found  # type: ignore[no-any-return]


def parse_device(device: Device) -> tuple[MemoryType, int]:
    """Kind of memory and number of the device. Raises `InvalidArgument`."""
    kind: Any = device
    index: Any = 0
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        kind = MemoryType.__members__.get(kind.upper())
        index = int(number) if number.isascii() and number.isdigit() else None if number else 0
    elif isinstance(device, tuple) and len(device) == 2:
        kind, index = device
    if isinstance(kind, DLDeviceType):
        kind = memory_type(kind)
    if not isinstance(kind, MemoryType) or not isinstance(index, int):
        raise InvalidArgument(
            f"invalid memory type {device!r}, expected cpu, cpu_pinned or gpu, or gpu:NUMBER for a certain one"
        )
    return kind, index


@dataclass
class MemoryBuffer:
    """Memory of a tensor: `size` bytes from address `data_ptr` on. Whoever holds `owner` holds the memory."""

    data_ptr: int
    memory_type: MemoryType
    memory_type_id: int
    size: int
    owner: Any

    @classmethod
    def from_dlpack(cls, owner: Any) -> MemoryBuffer:
        """The memory of an object with DLPack, on any device. Raises `InvalidArgument`."""
        found = dlpack.describe(owner)
        if not found.contiguous:
            raise InvalidArgument("only contiguous memory is supported")
        return cls(found.data_ptr, memory_type(found.device_type), found.device_id, found.size, owner)
