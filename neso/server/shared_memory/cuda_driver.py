"""The few functions of NVIDIA's driver that memory of other processes needs, by ctypes.

The driver and not the runtime library: it is there wherever a GPU can be used, whatever is installed beside.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)

HANDLE_SIZE = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class CudaError(Exception):
    """A call of the driver failed; the message has its name for the error."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_SIZE),)


class CudaDriver:
    """Opens memory that other processes have allocated on a GPU, and copies to and from it.

    Each call makes the primary context of the device current for itself only: the thread may be used by others too.
    Addresses are the device's. All methods raise `CudaError`.
    """

    def __init__(self, library: Any) -> None:
        """`library` is libcuda, loaded."""
        self._library = library
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _IpcHandle, ctypes.c_uint]
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.device_count = count.value

    @classmethod
    def load(cls) -> CudaDriver | None:
        """None where there is no driver or no GPU."""
        try:
            driver = cls(ctypes.CDLL("libcuda.so.1"))
        except (OSError, AttributeError, CudaError) as error:
            logger.debug("no CUDA shared memory: %s", error)
            return None
        return driver if driver.device_count else None

    def open(self, device: int, handle: bytes) -> int:
        """The address of the memory behind an IPC handle (of `HANDLE_SIZE` bytes), mapped until `close`."""
        address = ctypes.c_uint64()
        with self._on(device):
            value = _IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close(self, device: int, address: int) -> None:
        """Undo `open`."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def size(self, device: int, address: int) -> int:
        """Bytes of the allocation, from the address to its end."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._on(device):
            self._call(
                "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            )
        return base.value + size.value - address

    def copy_to_host(self, device: int, address: int, byte_size: int) -> bytearray:
        """The bytes from an address on."""
        data = bytearray(byte_size)
        with self._on(device):
            target = (ctypes.c_ubyte * byte_size).from_buffer(data)
            self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(byte_size))
        return data

    def copy_to_device(self, device: int, address: int, data: bytes) -> None:
        """Write bytes at an address, and wait until they are there."""
        with self._on(device):
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
            self._call("cuCtxSynchronize")  # a copy out of pageable memory may return before its end

    @contextmanager
    def _on(self, device: int) -> Iterator[None]:
        if device not in self._contexts:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(number), device)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
            self._contexts[device] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(name))
            raise CudaError((name.value or b"unknown error").decode())
