"""Active sequences, the slots they hold, and the strategies that form batches of them."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from neso.server.inference_response import ResponseStream
from neso.server.schedulers.dynamic_batcher import BatchChooser, Choice, after_delay
from neso.server.schedulers.sequence_inputs import States
from neso.server.signature import Signature


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


class Strategy(ABC):
    """`slots`: how many sequences an instance serves at the same time."""

    slots: int

    @classmethod
    def of(cls, config: Any, signature: Signature) -> Strategy:
        """By a `ModelConfig` message."""
        if config.sequence_batching.HasField("oldest"):
            return OldestStrategy(config, signature)
        return DirectStrategy(config, signature)

    @abstractmethod
    def choose(self, ready: list[ResponseStream]) -> Choice:
        """From the next requests of an instance's sequences, oldest first, at least one."""


class DirectStrategy(Strategy):
    """All that the slots of the instance have, once enough of them have something."""

    def __init__(self, config: Any, signature: Signature) -> None:
        direct = config.sequence_batching.direct
        self.slots = max(int(config.max_batch_size), 1)
        self._signature = signature
        self._delay_ns = 1000 * direct.max_queue_delay_microseconds
        self._enough = direct.minimum_slot_utilization * self.slots

    def choose(self, ready: list[ResponseStream]) -> Choice:
        first = ready[0].request
        batch = [stream for stream in ready if self._signature.batches_with(first, stream.request)]
        if len(batch) < len(ready) or len(ready) >= self._enough:
            return Choice(batch)
        return after_delay(batch, batch, self._delay_ns)


class OldestStrategy(Strategy):
    """Dynamic batching, among the next requests of the candidates."""

    def __init__(self, config: Any, signature: Signature) -> None:
        oldest = config.sequence_batching.oldest
        self.slots = max(int(oldest.max_candidate_sequences), 1)
        most = min(max(int(config.max_batch_size), 1), self.slots)
        self._chooser = BatchChooser(
            signature, most, oldest.preferred_batch_size, oldest.max_queue_delay_microseconds
        )

    def choose(self, ready: list[ResponseStream]) -> Choice:
        return self._chooser.choose(ready)
