"""Blocks of the paged KV cache: reference counts, and the free blocks in reuse order."""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from neso.generation.request import DEFAULT_PRIORITY

_EMPTY = -1
"""Queue key of blocks without cached content."""


class FreeBlocks:
    """Free blocks in reuse order: blocks without cached content first, then by lowest priority, then by age.

    A block keeps the priority set by `retain` until it is reused or the retention ends.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._queues = {
            _EMPTY: OrderedDict.fromkeys(range(num_blocks)),
            DEFAULT_PRIORITY: OrderedDict[int, None](),
        }
        self._order = [_EMPTY, DEFAULT_PRIORITY]
        self._queue_of: dict[int, int] = dict.fromkeys(range(num_blocks), _EMPTY)
        self._priorities: dict[int, int] = {}  # priorities other than the default
        self._until: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []  # a heap; entries that are not in `_until` are stale

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, block: int) -> bool:
        return block in self._queue_of

    def take(self) -> int:
        """Remove and return the next block to reuse. Raises `KeyError` if no block is free."""
        if self._ends:
            self._end_retention(time.monotonic())
        for priority in self._order:
            if queue := self._queues[priority]:
                block, _ = queue.popitem(last=False)
                del self._queue_of[block]
                self._forget(block)
                return block
        raise KeyError("there is no free block")

    def remove(self, block: int) -> None:
        """Remove a block because its cached content is used again."""
        del self._queues[self._queue_of.pop(block)][block]

    def add(self, block: int, *, content_cached: bool) -> None:
        """Add a block that is no longer in use; `content_cached`: its content is in the prefix cache."""
        priority = self._priorities.get(block, DEFAULT_PRIORITY) if content_cached else _EMPTY
        self._queue_of[block] = priority
        self._queues[priority][block] = None
        if not content_cached:
            self._queues[priority].move_to_end(block, last=False)
            self._forget(block)

    def retain(self, block: int, priority: int, seconds: float | None) -> None:
        """Set the priority of a block in use, for `seconds` or until it is reused."""
        self._forget(block)
        if priority == DEFAULT_PRIORITY:
            return
        self._priorities[block] = priority
        if priority not in self._queues:
            self._queues[priority] = OrderedDict()
            insort(self._order, priority)
        if seconds is not None:
            end = time.monotonic() + seconds
            self._until[block] = end
            heappush(self._ends, (end, block))
            if len(self._ends) > 2 * self._num_blocks:
                # Remove stale entries; most entries are stale, and they may expire only in weeks.
                self._ends = [(end, block) for block, end in self._until.items()]
                heapify(self._ends)

    def _end_retention(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, block = heappop(self._ends)
            if self._until.get(block) != end:
                continue  # stale
            self._forget(block)
            if block in self._queue_of:
                self.remove(block)
                self.add(block, content_cached=True)

    def _forget(self, block: int) -> None:
        self._priorities.pop(block, None)
        self._until.pop(block, None)


class IntegrityError(AssertionError):
    """The accounting is inconsistent: a block is lost, held twice, or both free and held."""


class BlockPool:
    """Reference counts of `num_blocks` blocks, and the free blocks in reuse order.

    A free block may still hold a cached prefix. It is reused after the blocks without one, and `share` takes it into
    use. Paged attention: https://arxiv.org/abs/2309.06180, section 4.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self.epochs: npt.NDArray[np.uint64] | None = None
        """uint64[num_blocks] if set: how often each block was allocated. See `SharedCache`."""
        self._free = FreeBlocks(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self) -> int:
        """Take the first free block. Raises `KeyError` if no block is free; check `num_free` before."""
        block = self._free.take()
        self._references[block] = 1
        if self.epochs is not None:
            self.epochs[block] += 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block in use, or to a free block that holds a cached prefix."""
        if self._references[block] == 0:
            self._free.remove(block)
        self._references[block] += 1

    def release(self, block: int, *, content_cached: bool) -> None:
        """Remove a reference. A block without references is free; it is reused last if its content is cached."""
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free.add(block, content_cached=content_cached)
        elif self._references[block] < 0:
            raise IntegrityError(f"block {block} was released more often than held")

    def retain(self, block: int, priority: int, seconds: float | None) -> None:
        """Set the priority of a block in use; it applies once the block is free."""
        self._free.retain(block, priority, seconds)

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Compare with `holders`, which maps a block to the number of block tables and holds that contain it.

        Raises `IntegrityError`.
        """
        for block, count in enumerate(self._references):
            if count != holders.get(block, 0):
                raise IntegrityError(
                    f"block {block} has {count} references, {holders.get(block, 0)} tables name it"
                )
            if (count == 0) != (block in self._free):
                raise IntegrityError(
                    f"block {block} has {count} references and is free: {block in self._free}"
                )
