"""The blocks of the cache that nobody holds, in the order of their reuse."""

from __future__ import annotations

import time
from bisect import insort
from collections import OrderedDict
from heapq import heapify, heappop, heappush

from neso.generation.request import DEFAULT_PRIORITY

_EMPTY = -1
"""The queue of blocks without content that may be asked for again."""


class FreeBlocks:
    """Those without content first, then by priority, the lowest first, and within one those that are free for longest.

    A block keeps the priority that `retain` gave it until it is reused, or that is over.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._queues = {
            _EMPTY: OrderedDict.fromkeys(range(num_blocks)),
            DEFAULT_PRIORITY: OrderedDict[int, None](),
        }
        self._order = [_EMPTY, DEFAULT_PRIORITY]
        self._queue_of: dict[int, int] = dict.fromkeys(range(num_blocks), _EMPTY)
        self._priorities: dict[int, int] = {}  # where it is not the default
        self._until: dict[int, float] = {}
        self._ends: list[tuple[float, int]] = []  # a heap; those that are not in `_until` are void

    def __len__(self) -> int:
        return len(self._queue_of)

    def __contains__(self, block: int) -> bool:
        return block in self._queue_of

    def take(self) -> int:
        """The next to be reused. Raises `KeyError` if there is none."""
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
        """Somebody holds it again, for its content."""
        del self._queues[self._queue_of.pop(block)][block]

    def add(self, block: int, *, content_cached: bool) -> None:
        """Nobody holds it any more; `content_cached`: its content may be asked for again."""
        priority = self._priorities.get(block, DEFAULT_PRIORITY) if content_cached else _EMPTY
        self._queue_of[block] = priority
        self._queues[priority][block] = None
        if not content_cached:
            self._queues[priority].move_to_end(block, last=False)
            self._forget(block)

    def retain(self, block: int, priority: int, seconds: float | None) -> None:
        """Give a block that somebody holds a priority, for so long or until it is reused."""
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
                # Most are of blocks that were retained anew or reused, and may be due in weeks only.
                self._ends = [(end, block) for block, end in self._until.items()]
                heapify(self._ends)

    def _end_retention(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, block = heappop(self._ends)
            if self._until.get(block) != end:
                continue  # it was retained anew, or reused
            self._forget(block)
            if block in self._queue_of:
                self.remove(block)
                self.add(block, content_cached=True)

    def _forget(self, block: int) -> None:
        self._priorities.pop(block, None)
        self._until.pop(block, None)
