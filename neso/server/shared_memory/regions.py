"""Shared-memory regions registered by clients: system and CUDA."""

from __future__ import annotations

import logging
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from neso.server.errors import (
    AlreadyExists,
    InternalError,
    InvalidArgument,
    NotFound,
    ServerError,
    Unsupported,
)
from neso.server.shared_memory.cuda import CudaDriver, CudaRegion
from neso.server.tensor import DataType, Tensor

logger = logging.getLogger(__name__)

REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"


class Region(Protocol):
    """Client memory registered with the server, on the host or on a GPU."""

    @property
    def name(self) -> str: ...

    def check(self, offset: int, byte_size: int) -> None: ...

    def read(self, offset: int, byte_size: int) -> memoryview: ...

    def write(self, offset: int, data: bytes | memoryview) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemoryWindow:
    """Part of a region that holds one tensor. Keeps the region mapped, and known by its name if it is unregistered."""

    region: Region
    offset: int
    byte_size: int

    def read(
        self,
        name: str,
        datatype: DataType,
        shape: tuple[int, ...],
        max_strings: int | None = None,
        model: str = "",
    ) -> Tensor:
        """Read a tensor in the binary tensor format. Raises `InvalidArgument`, see `Tensor.from_wire`.

        Fixed-size types are read-only views of host memory; client writes during the request are visible.
        """
        data = self.region.read(self.offset, self.byte_size)
        tensor = Tensor.from_wire(name, datatype, shape, data, model, max_strings)
        if tensor.array.flags.aligned:
            return tensor
        return replace(tensor, array=tensor.array.copy())  # some backends require aligned arrays

    def write(self, tensor: Tensor) -> int:
        """Write a tensor and return its size in bytes. Raises `InternalError` if the window is too small."""
        size = tensor.byte_size
        if size > self.byte_size:
            raise InternalError(
                f"shared memory size specified with the request for output '{tensor.name}' ({self.byte_size} bytes) "
                f"should be at least {size} bytes to hold the results"
            )
        if tensor.datatype is DataType.BYTES:
            self.region.write(self.offset, tensor.to_wire())
        else:
            elements = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
            self.region.write(self.offset, elements.data)
        return size

    def parameters(self, written: int) -> dict[str, str | int]:
        """Return the response parameters for an output of `written` bytes in this window."""
        return {REGION: self.region.name, OFFSET: self.offset, BYTE_SIZE: written}


_DIRECTORY = "/dev/shm"  # directory of shm_open on Linux


@dataclass(frozen=True, eq=False)  # without slots, so that there can be weak references to it
class SharedMemoryRegion:
    """A registered region: `byte_size` bytes at `offset` of the POSIX shared-memory object `key`.

    Mapped for the lifetime of this object and its views.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    _mapping: mmap.mmap
    _start: int  # start of the region in the mapping, which is page-aligned

    @classmethod
    def open(cls, name: str, key: str, offset: int, byte_size: int) -> SharedMemoryRegion:
        """Map the region. Raises `InvalidArgument` if out of range, `InternalError` if it cannot be opened."""
        descriptor = _open(key)
        try:
            if byte_size == 0 or offset + byte_size > os.fstat(descriptor).st_size:
                raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
            start = offset % mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(descriptor, start + byte_size, offset=offset - start)
        except OSError as error:
            raise InvalidArgument(f"failed to register shared memory region '{name}': {error}") from None
        finally:
            os.close(descriptor)  # the mapping has its own descriptor
        return cls(name, key, offset, byte_size, mapping, start)

    def check(self, offset: int, byte_size: int) -> None:
        """Raise `InvalidArgument` if the range is outside the region."""
        self.view(offset, byte_size)

    def read(self, offset: int, byte_size: int) -> memoryview:
        """Return a view of the bytes at `offset`. Raises `InvalidArgument`."""
        return self.view(offset, byte_size).toreadonly()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write bytes at `offset`. Raises `InvalidArgument`."""
        self.view(offset, len(data))[:] = data

    def view(self, offset: int, byte_size: int) -> memoryview:
        """Return a writable view of bytes at `offset`. Raises `InvalidArgument` if out of range."""
        if offset >= self.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if offset + byte_size > self.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{self.name}'")
        # Access to pages truncated by the client would raise SIGBUS.
        if self.offset + offset + byte_size > self._mapping.size():
            raise InvalidArgument(f"shared memory region '{self.name}' has shrunk since it was registered")
        start = self._start + offset
        return memoryview(self._mapping)[start : start + byte_size]


def _open(key: str) -> int:
    """Open the object as shm_open does; names with more slashes are invalid."""
    name = key.removeprefix("/")
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise InternalError(f"Unable to open shared memory region: '{key}'")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(os.path.join(_DIRECTORY, name), flags)
    except (OSError, UnicodeError):
        raise InternalError(f"Unable to open shared memory region: '{key}'") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InternalError(f"Unable to open shared memory region: '{key}'")
    return descriptor


Registration = tuple[str, tuple[str, Any, int, int]]
"""How a region was registered: name of the `SharedMemory` method, and its arguments (the region's name first)."""


R = TypeVar("R", bound=Region)


class _RegionTable(Generic[R]):
    """Regions of one kind by name.

    As in Triton, a removed region that requests use stays known until they have ended: it is listed, and later requests
    can use it. The weak references end with the last window. Unlike in Triton, its name can be registered again.
    """

    def __init__(self) -> None:
        self.registered: dict[str, R] = {}
        self.registrations: dict[str, Registration] = {}  # of the registered regions
        self._in_use: WeakValueDictionary[str, R] = WeakValueDictionary()  # removed, but used by requests

    def get(self, name: str) -> R | None:
        return self.registered.get(name) or self._in_use.get(name)

    def list(self) -> list[R]:
        return [*self.registered.values(), *self._in_use.values()]

    def add(self, region: R, registration: Registration) -> None:
        self._in_use.pop(region.name, None)
        self.registered[region.name] = region
        self.registrations[region.name] = registration

    def remove(self, name: str = "") -> None:
        """Remove the region of a name, if it exists, or all."""
        for one in [name] if name else list(self.registered):
            if (region := self.registered.pop(one, None)) is not None:
                self._in_use[one] = region
                del self.registrations[one]

    def clear(self) -> None:
        self.registered.clear()
        self.registrations.clear()
        self._in_use.clear()


class SharedMemory:
    """Registered regions by name: system and, with a GPU, CUDA shared memory.

    Methods raise `Unsupported` unless `enabled`, because clients can read and write all shared memory accessible to the
    server's user.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._system: _RegionTable[SharedMemoryRegion] = _RegionTable()
        self._cuda: _RegionTable[CudaRegion] = _RegionTable()
        self._unavailable: dict[str, Registration] = {}  # those that `follow` could not open

    @property
    def registrations(self) -> dict[str, Registration]:
        """How the regions were registered, by name."""
        return {**self._system.registrations, **self._cuda.registrations}

    def check_enabled(self) -> None:
        """Raise `Unsupported` if shared memory is disabled for clients."""
        if not self.enabled:
            raise Unsupported(
                "client shared memory is disabled; start the server with --allow-client-shm=true"
            )

    def close(self) -> None:
        """Remove all regions when the server stops."""
        self._system.clear()
        self._cuda.clear()

    @cached_property
    def cuda(self) -> CudaDriver | None:
        """The CUDA driver; None without a GPU or if disabled for clients."""
        return CudaDriver.load() if self.enabled else None

    def status(self, name: str = "") -> list[SharedMemoryRegion]:
        """Return the region of a name, or all regions. Raises `NotFound`."""
        self.check_enabled()
        if not name:
            return self._system.list()
        if (region := self._system.get(name)) is None:
            raise NotFound(f"Unable to find system shared memory region: '{name}'")
        return [region]

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Map `byte_size` bytes at `offset` of the shm_open object `key`. Raises `ServerError`."""
        self.check_enabled()
        self._check_free(name)
        if not key.strip("/"):
            raise InvalidArgument(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
        region = SharedMemoryRegion.open(name, key, offset, byte_size)
        self._system.add(region, ("register", (name, key, offset, byte_size)))

    def unregister(self, name: str = "") -> None:
        """Remove the region of a name, if it exists, or all. A region in use goes when its requests have ended."""
        self.check_enabled()
        self._system.remove(name)

    def window(self, name: str, offset: int, byte_size: int) -> SharedMemoryWindow:
        """Return a window of a region. Raises `NotFound`, `InvalidArgument` if out of range."""
        self.check_enabled()
        region = self._system.get(name) or self._cuda.get(name)
        if region is None:
            raise NotFound(f"Unable to find shared memory region: '{name}'")
        region.check(offset, byte_size)
        return SharedMemoryWindow(region, offset, byte_size)

    def cuda_status(self, name: str = "") -> list[CudaRegion]:
        """Return the region of a name, or all regions. Raises `NotFound`."""
        self.check_enabled()
        if not name:
            return self._cuda.list()
        if (region := self._cuda.get(name)) is None:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")
        return [region]

    def register_cuda(self, name: str, handle: bytes, device_id: int, byte_size: int) -> None:
        """Map GPU memory by an IPC handle of another process. Raises `ServerError`."""
        self.check_enabled()
        if self.cuda is None:
            raise InvalidArgument(
                f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
            )
        self._check_free(name)
        region = CudaRegion.open(name, self.cuda, handle, device_id, byte_size)
        self._cuda.add(region, ("register_cuda", (name, handle, device_id, byte_size)))

    def unregister_cuda(self, name: str = "") -> None:
        """Remove the region of a name, if it exists, or all. A region in use goes when its requests have ended."""
        self.check_enabled()
        self._cuda.remove(name)

    def follow(self, registrations: Mapping[str, Registration]) -> None:
        """Register and remove regions so that they are those of another process.

        A region that cannot be opened is skipped: the client may have deleted it since it was registered.
        """
        for name, known in self.registrations.items():
            if registrations.get(name) != known:
                self._system.remove(name)
                self._cuda.remove(name)
        for name, registration in registrations.items():
            if name in self.registrations or self._unavailable.get(name) == registration:
                continue
            method, arguments = registration
            try:
                getattr(self, method)(*arguments)
            except ServerError as error:
                self._unavailable[name] = registration
                logger.warning("shared memory region '%s' is not available: %s", name, error.message)
        self._unavailable = {
            name: known for name, known in self._unavailable.items() if registrations.get(name) == known
        }

    def _check_free(self, name: str) -> None:
        if name in self.registrations:
            raise AlreadyExists(f"shared memory region '{name}' already in manager")
