"""In-memory adapter cache with a size limit in bytes. Evicts the least recently used adapter that is not pinned."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """An object with a known size."""

    @property
    def num_bytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


class CacheFull(Exception):
    """There is not enough room, and all entries are pinned."""


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    num_bytes: int


class AdapterCache(Generic[T]):
    """Values by version. Pinned versions are never evicted; a version can be pinned before it is loaded."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self._entries: OrderedDict[int, _Entry[T]] = OrderedDict()  # by last use
        self._pins: dict[int, int] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, version: int) -> T | None:
        """Return the value; None if it is not loaded."""
        entry = self._entries.get(version)
        return None if entry is None else entry.value

    def pinned(self, version: int) -> bool:
        return version in self._pins

    def pin(self, version: int) -> None:
        """Prevent the eviction of a version, which may still be loading."""
        self._pins[version] = self._pins.get(version, 0) + 1
        self._touch(version)

    def unpin(self, version: int) -> None:
        """Undo one `pin`."""
        self._pins[version] -= 1
        if not self._pins[version]:
            del self._pins[version]
        self._touch(version)

    def put(self, version: int, value: T) -> list[int]:
        """Add a value and return the evicted versions. Raises `CacheFull` without any change."""
        size = value.num_bytes
        evicted: list[int] = []
        freed = 0
        for candidate, entry in self._entries.items():
            if self.num_bytes - freed + size <= self.capacity:
                break
            if candidate not in self._pins:
                evicted.append(candidate)
                freed += entry.num_bytes
        if self.num_bytes - freed + size > self.capacity:
            raise CacheFull
        for candidate in evicted:
            self.drop(candidate)
        self._entries[version] = _Entry(value, size)
        self.num_bytes += size
        return evicted

    def drop(self, version: int) -> None:
        """Remove a value."""
        self.num_bytes -= self._entries.pop(version).num_bytes

    def _touch(self, version: int) -> None:
        if version in self._entries:
            self._entries.move_to_end(version)
