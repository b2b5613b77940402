"""Shared memory that one side of a channel hands out, and the other looks at.

It is an anonymous file (memfd): it has no name that could be left behind, and is gone when both processes are, however
they ended. It grows in segments, each mapped on its own, and does not shrink.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from io import FileIO
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.backends.python.process.messages import Block

ALIGNMENT = 64

Bytes = npt.NDArray[np.uint8]


def make_file(name: str) -> FileIO:
    """An empty file in memory, which the other process can let grow but not shrink."""
    file = FileIO(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+")
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


class Arena:
    """The owner's side: gives out blocks, and takes them back once nobody looks at them.

    Safe to use from any thread; `release` even from a finalizer. Sizes are in bytes.
    """

    def __init__(self, file: FileIO, default_size: int, growth_size: int) -> None:
        self._file = file
        self._default_size, self._growth_size = default_size, growth_size
        self._segments: list[_Segment] = []
        self._end = 0
        self._lock = threading.Lock()
        self._released: deque[int] = deque()  # finalizers can wait for no lock
        self._viewers: dict[int, int] = {}

    @property
    def in_use(self) -> int:
        """Bytes in blocks that are not released."""
        with self._lock:
            self._collect()
            return sum(sum(segment.taken.values()) for segment in self._segments)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._end

    def allocate(self, size: int) -> tuple[Block, Bytes]:
        """A block with one viewer, and its memory. Raises `OSError` when the machine has no more."""
        needed = _round_up(max(size, 1), ALIGNMENT)
        with self._lock:
            self._collect()
            for segment in self._segments:
                if (offset := segment.take(needed)) is not None:
                    break
            else:
                segment = self._grow(needed)
                offset = segment.take(needed)
                assert offset is not None
            self._viewers[offset] = 1
        return Block(segment.start, segment.size, offset, size), segment.view(offset, size)

    def look_again(self, block: Block) -> Bytes:
        """The memory of a block that was handed out, for one more viewer; released when that array is gone."""
        with self._lock:
            self._viewers[block.offset] += 1
            segment = next(segment for segment in self._segments if segment.start == block.segment)
        return _watched(segment.view(block.offset, block.size), lambda: self.release(block.offset))

    def release(self, offset: int) -> None:
        """One viewer of a block less."""
        self._released.append(offset)

    def close(self) -> None:
        """Close the file: there will be no more memory. What somebody looks at stays."""
        with self._lock:
            self._file.close()

    def _collect(self) -> None:
        while self._released:
            offset = self._released.popleft()
            self._viewers[offset] -= 1
            if not self._viewers[offset]:
                del self._viewers[offset]
                next(segment for segment in self._segments if segment.holds(offset)).give_back(offset)

    def _grow(self, needed: int) -> _Segment:
        size = self._default_size
        if self._segments or needed > size:
            # At least doubled: each segment is a descriptor in both processes. Pages take memory when they are used.
            size = _round_up(max(needed, self._end), self._growth_size)
        size = _round_up(size, mmap.ALLOCATIONGRANULARITY)
        try:
            self._file.truncate(self._end + size)
        except ValueError as error:  # closed
            raise OSError(str(error)) from None
        segment = _Segment(self._file, self._end, size)
        self._segments.append(segment)
        self._end += size
        return segment


class _Segment:
    """A mapped part of the file: which of its bytes are free (in order, neighbours joined), and which are taken."""

    def __init__(self, file: FileIO, start: int, size: int) -> None:
        self.start, self.size = start, size
        self.taken: dict[int, int] = {}
        self._free = [(start, size)]
        self._mapping = mmap.mmap(file.fileno(), size, offset=start)

    def holds(self, offset: int) -> bool:
        return self.start <= offset < self.start + self.size

    def view(self, offset: int, size: int) -> Bytes:
        return np.frombuffer(self._mapping, np.uint8, size, offset - self.start)

    def take(self, size: int) -> int | None:
        """The first place that is large enough."""
        for index, (offset, room) in enumerate(self._free):
            if room < size:
                continue
            if room == size:
                del self._free[index]
            else:
                self._free[index] = (offset + size, room - size)
            self.taken[offset] = size
            return offset
        return None

    def give_back(self, offset: int) -> None:
        size = self.taken.pop(offset)
        index = bisect_left(self._free, (offset,))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1][0], self._free.pop(index - 1)[1]
            size += before
        insort(self._free, (offset, size))


class Visitor:
    """The other side: looks at blocks. `release` is called with the offset of one that nobody looks at any more,
    in whatever thread dropped the last array; it must not wait for a lock.
    """

    def __init__(self, file: FileIO, release: Callable[[int], None]) -> None:
        self._file = file
        self._release = release
        self._mappings: dict[int, mmap.mmap] = {}
        self._visited: dict[int, tuple[Block, int]] = {}  # with the address where it is mapped

    def view(self, block: Block) -> Bytes:
        """The memory of a block. Raises `ValueError` for one that is outside of the file."""
        mapping = self._mappings.get(block.segment)
        if mapping is None:
            mapping = mmap.mmap(self._file.fileno(), block.segment_size, offset=block.segment)
            self._mappings[block.segment] = mapping
        memory = np.frombuffer(mapping, np.uint8, block.size, block.offset - block.segment)
        self._visited[block.offset] = block, memory.__array_interface__["data"][0]
        return _watched(memory, lambda: self._leave(block.offset))

    def find(self, array: npt.NDArray[Any]) -> tuple[Block, int] | None:
        """The block whose memory a contiguous array looks at, and where in it; None for memory from elsewhere."""
        if not self._visited:
            return None
        address = array.__array_interface__["data"][0]
        for block, start in self._visited.copy().values():
            if start <= address and address + array.nbytes <= start + block.size:
                return block, address - start
        return None

    def _leave(self, offset: int) -> None:
        self._visited.pop(offset, None)
        self._release(offset)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _watched(memory: Bytes, gone: Callable[[], None]) -> Bytes:
    """The array; `gone` is called when it and all views of it have died.

    Views of an array that was made from a buffer have it as their base, however long their chain is.
    """

    def died(watch: weakref.ref[Bytes]) -> None:
        del _watches[id(watch)]
        gone()

    watch = weakref.ref(memory, died)
    _watches[id(watch)] = watch
    return memory


_watches: dict[int, weakref.ref[Bytes]] = {}  # a reference that is not held itself is never called
