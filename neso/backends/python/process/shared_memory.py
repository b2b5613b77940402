"""Shared memory between two processes: `Arena` allocates blocks on one side, `ArenaReader` maps them on the other.

The memory is an anonymous file (memfd), which the kernel frees when both processes have ended. It grows in segments,
each mapped separately, and does not shrink, but `trim` returns the pages of unused segments.

Reference counting: `Arena._num_viewers` counts the viewers of each block. Arrays returned by `view` and `view_again`
release their block when they and all their views are garbage collected. Finalizers must not wait for locks, so
`release` only appends to a deque that the next `allocate` processes.
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
KEPT = 64 << 20
"""Bytes at the start of the file whose pages are kept for the next blocks."""

Bytes = npt.NDArray[np.uint8]


def make_file(name: str) -> FileIO:
    """Create an empty memfd, sealed so that the other process cannot shrink it."""
    file = FileIO(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+")
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return file


class Arena:
    """Owner's side: allocates blocks and frees them when they have no viewers. Sizes are in bytes.

    Thread-safe. `release` can be called from finalizers.
    """

    def __init__(self, file: FileIO, default_size: int, growth_size: int) -> None:
        self._file = file
        self._default_size, self._growth_size = default_size, growth_size
        self._segments: list[_Segment] = []
        self._end = 0
        self._used_end = 0  # end of the blocks allocated since the last trim
        self._lock = threading.Lock()
        self._released: deque[int] = deque()
        self._num_viewers: dict[int, int] = {}  # by block offset

    @property
    def in_use(self) -> int:
        """Total size of allocated blocks."""
        with self._lock:
            self._collect()
            return sum(sum(segment.taken.values()) for segment in self._segments)

    @property
    def size(self) -> int:
        """Size of the file."""
        return self._end

    def allocate(self, size: int) -> tuple[Block, Bytes]:
        """Allocate a block with one viewer; return it and its memory. Raises `OSError` if memory is exhausted."""
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
            self._num_viewers[offset] = 1
            self._used_end = max(self._used_end, offset + needed)
        return Block(segment.start, segment.size, offset, size), segment.view(offset, size)

    def view_again(self, block: Block) -> Bytes:
        """Add a viewer to an allocated block. It is released when the returned array is garbage collected."""
        with self._lock:
            self._num_viewers[block.offset] += 1
            segment = next(segment for segment in self._segments if segment.start == block.segment)
        return _with_finalizer(segment.view(block.offset, block.size), lambda: self.release(block.offset))

    def release(self, offset: int) -> None:
        """Remove one viewer of a block."""
        self._released.append(offset)

    def trim(self) -> None:
        """Return the pages beyond `KEPT` to the operating system if no block is allocated. Not for finalizers."""
        if self._used_end <= KEPT:
            return
        with self._lock:
            self._collect()
            if self._num_viewers:
                return
            for segment in self._segments:
                segment.discard(KEPT)
            self._used_end = 0

    def close(self) -> None:
        """Close the file, so that `allocate` can no longer grow it. Mapped memory stays valid."""
        with self._lock:
            self._file.close()

    def _collect(self) -> None:
        while self._released:
            offset = self._released.popleft()
            self._num_viewers[offset] -= 1
            if not self._num_viewers[offset]:
                del self._num_viewers[offset]
                next(segment for segment in self._segments if segment.holds(offset)).give_back(offset)

    def _grow(self, needed: int) -> _Segment:
        size = self._default_size
        if self._segments or needed > size:
            # At least double the size, to limit the number of mappings. Unused pages use no memory.
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
    """A mapped segment of the file with a first-fit allocator.

    `taken`: size by offset. `_free`: (offset, size) in ascending order, adjacent ranges merged.
    """

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
        """Allocate the first free range that is large enough; None if there is none."""
        for index, (offset, free_size) in enumerate(self._free):
            if free_size < size:
                continue
            if free_size == size:
                del self._free[index]
            else:
                self._free[index] = (offset + size, free_size - size)
            self.taken[offset] = size
            return offset
        return None

    def discard(self, start: int) -> None:
        """Return the pages from position `start` of the file on to the operating system. No block may use them."""
        first = max(start - self.start, 0)
        if first < self.size:
            self._mapping.madvise(mmap.MADV_REMOVE, first, self.size - first)

    def give_back(self, offset: int) -> None:
        size = self.taken.pop(offset)
        index = bisect_left(self._free, (offset,))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            offset, before = self._free[index - 1][0], self._free.pop(index - 1)[1]
            size += before
        insort(self._free, (offset, size))


class ArenaReader:
    """Reader's side: maps blocks of the other process.

    `release` is called, in any thread, with the offset of a block whose last array was garbage collected. It must not
    wait for locks.
    """

    def __init__(self, file: FileIO, release: Callable[[int], None]) -> None:
        self._file = file
        self._release = release
        self._mappings: dict[int, mmap.mmap] = {}
        self._viewed: dict[int, tuple[Block, int]] = {}  # block and mapped address, by block offset

    def view(self, block: Block) -> Bytes:
        """Return the memory of a block. Raises `ValueError` if it is outside the file."""
        mapping = self._mappings.get(block.segment)
        if mapping is None:
            mapping = mmap.mmap(self._file.fileno(), block.segment_size, offset=block.segment)
            self._mappings[block.segment] = mapping
        memory = np.frombuffer(mapping, np.uint8, block.size, block.offset - block.segment)
        self._viewed[block.offset] = block, memory.__array_interface__["data"][0]
        return _with_finalizer(memory, lambda: self._release_viewed(block.offset))

    def find(self, array: npt.NDArray[Any]) -> tuple[Block, int] | None:
        """Return the viewed block that contains a contiguous array, and the array's offset in it, or None."""
        if not self._viewed:
            return None
        address = array.__array_interface__["data"][0]
        for block, start in self._viewed.copy().values():
            if start <= address and address + array.nbytes <= start + block.size:
                return block, address - start
        return None

    def _release_viewed(self, offset: int) -> None:
        self._viewed.pop(offset, None)
        self._release(offset)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _with_finalizer(memory: Bytes, on_collected: Callable[[], None]) -> Bytes:
    """Return `memory`; call `on_collected` when it and all its views have been garbage collected.

    The base of every view, also of a view of a view, is the array created from the buffer.
    """

    def collected(reference: weakref.ref[Bytes]) -> None:
        del _finalizers[id(reference)]
        on_collected()

    reference = weakref.ref(memory, collected)
    _finalizers[id(reference)] = reference
    return memory


# Keeps the weak references alive; otherwise their callbacks do not run.
_finalizers: dict[int, weakref.ref[Bytes]] = {}
