"""Counts of several processes in shared memory, for limits that hold for all of them together.

Each process changes its own counts only, so there are no locks, and the counts of a process that has ended are cleared.
Two processes that admit something at the same moment can exceed a limit by one request each.
"""

from __future__ import annotations

import mmap
import os
from zlib import crc32

BUCKETS = 1 << 14
"""Names are counted by hash. Two names in one bucket count as one in the processes that do not know them."""
_ROW = 1 + BUCKETS  # the total, and the counts by bucket
_ITEM = 8


class SharedCounts:
    """Counts by name, and their total. `index`: the number of this process, from 0."""

    def __init__(self, descriptor: int, num_processes: int, index: int) -> None:
        self.descriptor = descriptor
        self.num_processes = num_processes
        size = num_processes * _ROW * _ITEM
        self._counts = memoryview(mmap.mmap(descriptor, size)).cast("q")
        self._own = index * _ROW
        self._others = tuple(n * _ROW for n in range(num_processes) if n != index)

    @classmethod
    def create(cls, num_processes: int) -> SharedCounts:
        """Create counts of zero in anonymous memory. This process has the index 0."""
        descriptor = os.memfd_create("neso-counts")
        os.ftruncate(descriptor, num_processes * _ROW * _ITEM)
        return cls(descriptor, num_processes, 0)

    def add(self, name: str, amount: int) -> None:
        """Change the count of a name, and the total of this process."""
        counts, own = self._counts, self._own
        counts[own] += amount
        if name:
            counts[own + _bucket(name)] += amount

    def elsewhere(self, name: str = "") -> int:
        """Return the count of a name in the other processes; by default their totals."""
        place = _bucket(name) if name else 0
        return sum(self._counts[row + place] for row in self._others)

    def clear(self, index: int) -> None:
        """Set the counts of a process that has ended to zero."""
        start = index * _ROW
        self._counts[start : start + _ROW] = memoryview(bytes(_ROW * _ITEM)).cast("q")


def _bucket(name: str) -> int:
    return 1 + crc32(name.encode("utf-8", "surrogatepass")) % BUCKETS
