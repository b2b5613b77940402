"""Sequences that are under way, and the slots of the instances that they hold."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from neso.server.inference_response import ResponseStream
from neso.server.schedulers.sequence_state import States


@dataclass(slots=True, eq=False)
class Sequence:
    """Requests of one correlation id, in order of arrival.

    - waiting: those that were not sent; some of them may have been cancelled
    - running: the one that was sent and has not ended, None without one
    - executed: whether the execution of `running` is over; its responses may still come
    - again: whether `running` is to be executed again, as part of an iterative sequence
    - started: when `running` was executed first, in ns of the monotonic clock, if it was executed before
    - begun: whether a START was executed, and no END since
    - ended: whether the last request that was accepted has END
    - instance, slot: where it holds a slot, None while it waits for one
    """

    id: int | str
    waiting: deque[ResponseStream] = field(default_factory=deque)
    running: ResponseStream | None = None
    executed: bool = False
    again: bool = False
    started: int = 0
    begun: bool = False
    ended: bool = False
    instance: int | None = None
    slot: int | None = None
    states: States = field(default_factory=dict)

    @property
    def next(self) -> ResponseStream | None:
        """The request that may be sent now."""
        return self.waiting[0] if self.waiting and self.running is None else None


class SequenceSlots:
    """`per_instance` sequences on each instance, and a backlog of those that wait for a slot, in order of arrival."""

    def __init__(self, num_instances: int, per_instance: int) -> None:
        # Dictionaries as ordered sets: sequences leave from anywhere.
        self._holders: list[dict[Sequence, None]] = [{} for _ in range(num_instances)]
        self._free = [
            list(range(per_instance)) for _ in range(num_instances)
        ]  # heaps: the first slot is taken first
        self._backlog: dict[Sequence, None] = {}

    def __len__(self) -> int:
        """How many instances there are."""
        return len(self._holders)

    def holders(self, instance: int) -> list[Sequence]:
        return list(self._holders[instance])

    def enter(self, sequence: Sequence) -> None:
        """Get a slot, or a place at the end of the backlog."""
        self._backlog[sequence] = None
        self._assign()

    def leave(self, sequence: Sequence) -> None:
        """Give the slot to the first of the backlog, or leave the backlog."""
        self._backlog.pop(sequence, None)
        if sequence.instance is not None and sequence.slot is not None:
            del self._holders[sequence.instance][sequence]
            heapq.heappush(self._free[sequence.instance], sequence.slot)
            sequence.instance = sequence.slot = None
            self._assign()

    def _assign(self) -> None:
        while self._backlog:
            # The emptiest instance: sequences on different instances do not wait for each other.
            instance = max(range(len(self._free)), key=lambda index: len(self._free[index]))
            if not self._free[instance]:
                return
            sequence = next(iter(self._backlog))
            del self._backlog[sequence]
            sequence.instance, sequence.slot = instance, heapq.heappop(self._free[instance])
            self._holders[instance][sequence] = None
