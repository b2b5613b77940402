"""Active sequences, their slots, and the strategies that form batches."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from neso.server.inference_response import ResponseStream
from neso.server.schedulers.dynamic_batcher import BatchChoice, BatchChooser, after_delay
from neso.server.schedulers.sequence_inputs import States
from neso.server.signature import Signature


@dataclass(slots=True, eq=False)
class Sequence:
    """Requests of one correlation id, in order of arrival.

    - waiting: requests that were not executed yet
    - running: the request being executed or waiting for its responses; None if there is no such request
    - executed: the execution of `running` has ended; responses can still follow
    - again: `running` will be executed again (iterative sequence)
    - started: start of the first execution of `running`, in ns of the monotonic clock, if it was executed before
    - begun: a START was executed, and no END after it
    - ended: the last accepted request has END
    - instance, slot: instance and index of its slot; None while it is in the backlog
    - expires: when the first waiting request times out in the backlog, in ns of the monotonic clock; None for never
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
    expires: int | None = None
    states: States = field(default_factory=dict)

    @property
    def next(self) -> ResponseStream | None:
        """Return the request that can be executed now, if any."""
        return self.waiting[0] if self.waiting and self.running is None else None

    def take_first_sequence(self) -> list[ResponseStream]:
        """Remove and return the waiting requests up to the first END; the following ones start a new sequence."""
        taken = []
        while self.waiting:
            taken.append(self.waiting.popleft())
            if taken[-1].request.sequence_end:
                break
        return taken

    def take_requests_with(self, stream: ResponseStream) -> list[ResponseStream]:
        """Remove and return the waiting requests from the START to the END that `stream`, one of them, belongs to."""
        requests = list(self.waiting)
        first = last = requests.index(stream)
        while first > 0 and not (
            requests[first].request.sequence_start or requests[first - 1].request.sequence_end
        ):
            first -= 1
        while last + 1 < len(requests) and not (
            requests[last].request.sequence_end or requests[last + 1].request.sequence_start
        ):
            last += 1
        self.waiting = deque(requests[:first] + requests[last + 1 :])
        return requests[first : last + 1]


class SequenceSlots:
    """Assigns sequences to `per_instance` slots per instance. Other sequences wait in a backlog, by arrival."""

    def __init__(self, num_instances: int, per_instance: int) -> None:
        # dictionaries used as ordered sets
        self._holders: list[dict[Sequence, None]] = [{} for _ in range(num_instances)]
        self._free = [list(range(per_instance)) for _ in range(num_instances)]  # heaps: the lowest slot first
        self._backlog: dict[Sequence, None] = {}

    def __len__(self) -> int:
        """Number of instances."""
        return len(self._holders)

    def holders(self, instance: int) -> list[Sequence]:
        return list(self._holders[instance])

    def enter(self, sequence: Sequence) -> None:
        """Assign a slot, or append to the backlog."""
        self._backlog[sequence] = None
        self._assign()

    def leave(self, sequence: Sequence) -> None:
        """Release the slot or leave the backlog."""
        self._backlog.pop(sequence, None)
        if sequence.instance is not None and sequence.slot is not None:
            del self._holders[sequence.instance][sequence]
            heapq.heappush(self._free[sequence.instance], sequence.slot)
            sequence.instance = sequence.slot = None
            self._assign()

    def _assign(self) -> None:
        while self._backlog:
            # the instance with the most free slots, because sequences on different instances run concurrently
            instance = max(range(len(self._free)), key=lambda index: len(self._free[index]))
            if not self._free[instance]:
                return
            sequence = next(iter(self._backlog))
            del self._backlog[sequence]
            sequence.instance, sequence.slot = instance, heapq.heappop(self._free[instance])
            self._holders[instance][sequence] = None


class Strategy(ABC):
    """Forms batches from the next requests of sequences. `slots`: concurrent sequences per instance."""

    slots: int

    @classmethod
    def of(cls, config: Any, signature: Signature) -> Strategy:
        """Create the strategy of a `ModelConfig` message."""
        if config.sequence_batching.HasField("oldest"):
            return OldestStrategy(config, signature)
        return DirectStrategy(config, signature)

    @abstractmethod
    def choose(self, ready: list[ResponseStream]) -> BatchChoice:
        """Choose a batch from `ready`: the next requests of an instance's sequences, oldest first, not empty."""


class DirectStrategy(Strategy):
    """Direct strategy: a batch of all ready slots, once enough slots are ready."""

    def __init__(self, config: Any, signature: Signature) -> None:
        direct = config.sequence_batching.direct
        self.slots = max(int(config.max_batch_size), 1)
        self._signature = signature
        self._delay_ns = 1000 * direct.max_queue_delay_microseconds
        self._enough = direct.minimum_slot_utilization * self.slots

    def choose(self, ready: list[ResponseStream]) -> BatchChoice:
        first = ready[0].request
        batch = [stream for stream in ready if self._signature.batches_with(first, stream.request)]
        if len(batch) < len(ready) or len(ready) >= self._enough:
            return BatchChoice(batch)
        return after_delay(batch, batch, self._delay_ns)


class OldestStrategy(Strategy):
    """Oldest strategy: dynamic batching of the candidate sequences' next requests."""

    def __init__(self, config: Any, signature: Signature) -> None:
        oldest = config.sequence_batching.oldest
        self.slots = max(int(oldest.max_candidate_sequences), 1)
        most = min(max(int(config.max_batch_size), 1), self.slots)
        self._chooser = BatchChooser(
            signature, most, oldest.preferred_batch_size, oldest.max_queue_delay_microseconds
        )

    def choose(self, ready: list[ResponseStream]) -> BatchChoice:
        return self._chooser.choose(ready)
