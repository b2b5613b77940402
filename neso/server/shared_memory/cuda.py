"""CUDA shared memory: driver calls and regions."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from neso.server.errors import InternalError, InvalidArgument

logger = logging.getLogger(__name__)

HANDLE_SIZE = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class CudaError(Exception):
    """A driver call failed. The message contains the driver's error name."""


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_SIZE),)


class CudaDriver:
    """Opens GPU memory allocated by other processes, and copies to and from it.

    Uses the driver API through ctypes, without the CUDA runtime library. The primary context of the device is current
    only during a call. Addresses are device addresses. All methods raise `CudaError`.
    """

    def __init__(self, library: Any) -> None:
        """`library`: the loaded libcuda."""
        self._library = library
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, _IpcHandle, ctypes.c_uint]
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        self.device_count = count.value

    @classmethod
    def load(cls) -> CudaDriver | None:
        """Load the driver. Returns None without a driver or a GPU."""
        try:
            driver = cls(ctypes.CDLL("libcuda.so.1"))
        except (OSError, AttributeError, CudaError) as error:
            logger.debug("no CUDA shared memory: %s", error)
            return None
        return driver if driver.device_count else None

    def open(self, device: int, handle: bytes) -> int:
        """Map the memory of an IPC handle (`HANDLE_SIZE` bytes) and return its address."""
        address = ctypes.c_uint64()
        with self._on(device):
            value = _IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def close(self, device: int, address: int) -> None:
        """Unmap memory mapped by `open`."""
        with self._on(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def size(self, device: int, address: int) -> int:
        """Return the number of bytes from the address to the end of its allocation."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        with self._on(device):
            self._call(
                "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
            )
        return base.value + size.value - address

    def copy_to_host(self, device: int, address: int, byte_size: int) -> bytearray:
        """Read bytes at an address."""
        data = bytearray(byte_size)
        with self._on(device):
            target = (ctypes.c_ubyte * byte_size).from_buffer(data)
            self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(byte_size))
        return data

    def copy_to_device(self, device: int, address: int, data: bytes) -> None:
        """Write bytes at an address, synchronously."""
        with self._on(device):
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
            self._call("cuCtxSynchronize")  # a copy from pageable memory can return before it has finished

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


@dataclass(frozen=True, eq=False)
class CudaRegion:
    """A registered region of GPU memory, copied to and from the host. Mapped for the lifetime of this object."""

    name: str
    device_id: int
    byte_size: int
    _driver: CudaDriver
    _address: int

    @classmethod
    def open(cls, name: str, driver: CudaDriver, handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
        """Map the region. Raises `InvalidArgument` for an invalid handle or size."""
        if len(handle) != HANDLE_SIZE or not 0 <= device_id < driver.device_count or byte_size <= 0:
            raise _refused(name, "invalid args")
        try:
            address = driver.open(device_id, handle)
        except CudaError as error:
            raise _refused(name, str(error)) from None
        region = cls(name, device_id, byte_size, driver, address)
        weakref.finalize(region, _close, driver, device_id, address)
        try:
            if byte_size > driver.size(device_id, address):
                raise _refused(name, "invalid args")
        except CudaError as error:
            raise _refused(name, str(error)) from None
        return region

    def check(self, offset: int, byte_size: int) -> None:
        """Raise `InvalidArgument` if the range is outside the region."""
        if offset >= self.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if offset + byte_size > self.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{self.name}'")

    def read(self, offset: int, byte_size: int) -> memoryview:
        """Return a copy of the bytes at `offset`. Raises `InvalidArgument`, `InternalError`."""
        self.check(offset, byte_size)
        try:
            data = self._driver.copy_to_host(self.device_id, self._address + offset, byte_size)
        except CudaError as error:
            raise InternalError(f"failed to read CUDA shared memory region '{self.name}': {error}") from None
        return memoryview(data).toreadonly()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at `offset`. Raises `InvalidArgument`, `InternalError`."""
        self.check(offset, len(data))
        try:
            self._driver.copy_to_device(self.device_id, self._address + offset, bytes(data))
        except CudaError as error:
            raise InternalError(f"failed to write CUDA shared memory region '{self.name}': {error}") from None


def _close(driver: CudaDriver, device_id: int, address: int) -> None:
    try:
        driver.close(device_id, address)
    except CudaError as error:
        logger.warning("failed to close CUDA shared memory: %s", error)


def _refused(name: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"failed to register CUDA shared memory region: '{name}', {why}")
