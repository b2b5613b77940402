"""A system shared memory object of a client, mapped into this process."""

from __future__ import annotations

import mmap
import os
import stat
from dataclasses import dataclass

from neso.server.errors import InternalError, InvalidArgument

_DIRECTORY = "/dev/shm"  # where shm_open has its objects on Linux


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemoryRegion:
    """`byte_size` bytes from `offset` of the object that clients know by `key`.

    Mapped for as long as this object or a view of it lives, whether it is still registered or not.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    _mapping: mmap.mmap
    _start: int  # of the region in the mapping, which begins at a page

    @classmethod
    def open(cls, name: str, key: str, offset: int, byte_size: int) -> SharedMemoryRegion:
        """Map it. Raises `InvalidArgument` if it is out of range, `InternalError` if it cannot be opened."""
        descriptor = _open(key)
        try:
            if byte_size == 0 or offset + byte_size > os.fstat(descriptor).st_size:
                raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
            start = offset % mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(descriptor, start + byte_size, offset=offset - start)
        except OSError as error:
            raise InvalidArgument(f"failed to register shared memory region '{name}': {error}") from None
        finally:
            os.close(descriptor)  # the mapping has its own
        return cls(name, key, offset, byte_size, mapping, start)

    def check(self, offset: int, byte_size: int) -> None:
        """Raises `InvalidArgument` for a part that is out of range."""
        self.view(offset, byte_size)

    def read(self, offset: int, byte_size: int) -> memoryview:
        """The bytes from `offset` of the region, not a copy of them. Raises `InvalidArgument`."""
        return self.view(offset, byte_size).toreadonly()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at `offset` of the region. Raises `InvalidArgument`."""
        self.view(offset, len(data))[:] = data

    def view(self, offset: int, byte_size: int) -> memoryview:
        """`byte_size` writable bytes from `offset` of the region. Raises `InvalidArgument` if out of range."""
        if offset >= self.byte_size:
            raise InvalidArgument(f"Invalid offset for shared memory region: '{self.name}'")
        if offset + byte_size > self.byte_size:
            raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{self.name}'")
        # To touch pages that a client has cut off the object would kill the server (SIGBUS).
        if self.offset + offset + byte_size > self._mapping.size():
            raise InvalidArgument(f"shared memory region '{self.name}' has shrunk since it was registered")
        start = self._start + offset
        return memoryview(self._mapping)[start : start + byte_size]


def _open(key: str) -> int:
    """A descriptor of the object, as shm_open gives it: names with further slashes lead nowhere."""
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
