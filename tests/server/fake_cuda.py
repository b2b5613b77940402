"""A fake NVIDIA driver library: devices with host memory."""

from __future__ import annotations

import ctypes
from typing import Any

INVALID_HANDLE = 400


class FakeCuda:
    """`allocate` stands for another process; other functions are called through `CudaDriver`.

    `opened`: currently mapped addresses. `depth`: number of pushed contexts.
    """

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.memory: dict[bytes, Any] = {}
        self.opened: list[int] = []
        self.depth = 0
        self.failing = ""
        self.cuIpcOpenMemHandle_v2 = _Function(self._open)

    def allocate(self, size: int) -> tuple[bytes, Any]:
        """Allocate memory of this many bytes; return its handle and the memory."""
        handle = bytes([len(self.memory) + 1]) * 64
        self.memory[handle] = (ctypes.c_ubyte * size)()
        return handle, self.memory[handle]

    def __getattr__(self, name: str) -> Any:
        if name == self.failing:
            return lambda *arguments: INVALID_HANDLE
        return _SUCCEEDS if name in ("cuInit", "cuCtxSynchronize") else super().__getattribute__(name)

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.devices
        return 0

    def cuDeviceGet(self, number: Any, device: int) -> int:
        number._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:
        context._obj.value = 1000 + number.value
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        assert context.value >= 1000
        self.depth += 1
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.depth -= 1
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.opened.remove(address.value)
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        for memory in self.memory.values():
            if ctypes.addressof(memory) == address.value:
                base._obj.value, size._obj.value = address.value, len(memory)
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, address: Any, size: Any) -> int:
        assert self.depth == 1
        if self.failing == "copies":
            return INVALID_HANDLE
        ctypes.memmove(target, address.value, size.value)
        return 0

    def cuMemcpyHtoD_v2(self, address: Any, source: bytes, size: Any) -> int:
        assert self.depth == 1
        if self.failing == "copies":
            return INVALID_HANDLE
        ctypes.memmove(address.value, source, size.value)
        return 0

    def cuGetErrorName(self, status: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_INVALID_HANDLE"
        return 0

    def _open(self, address: Any, handle: Any, flags: int) -> int:
        memory = self.memory.get(bytes(handle.reserved))
        if memory is None:
            return INVALID_HANDLE
        address._obj.value = ctypes.addressof(memory)
        self.opened.append(address._obj.value)
        return 0


class _Function:
    """A function with an attribute `argtypes`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.argtypes: list[Any] = []

    def __call__(self, *arguments: Any) -> int:
        return self._call(*arguments)  # type: ignore[no-any-return]


def _SUCCEEDS(*arguments: Any) -> int:
    return 0
