"""Which of the requests that sequences have ready make a batch, and how long it is worth to wait for more."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from neso.server.inference_response import ResponseStream
from neso.server.signature import Signature


@dataclass(frozen=True, slots=True)
class Choice:
    """A batch to send, or none and the time to look again, in ns of the monotonic clock; None: when more comes."""

    batch: list[ResponseStream] = field(default_factory=list)
    until: int | None = None


class Strategy(ABC):
    """`slots`: how many sequences an instance serves at the same time."""

    slots: int

    def __init__(self, signature: Signature, delay_us: int) -> None:
        self._signature = signature
        self._delay_ns = 1000 * delay_us

    @classmethod
    def of(cls, config: Any, signature: Signature) -> Strategy:
        """By a `ModelConfig` message."""
        if config.sequence_batching.HasField("oldest"):
            return OldestStrategy(config, signature)
        return DirectStrategy(config, signature)

    @abstractmethod
    def choose(self, ready: list[ResponseStream]) -> Choice:
        """From the next requests of an instance's sequences, oldest first, at least one."""

    def _unless_early(self, batch: list[ResponseStream]) -> Choice:
        """The batch if its oldest request has waited enough."""
        until = batch[0].timeline.queue_start + self._delay_ns
        return Choice(batch) if time.monotonic_ns() >= until else Choice(until=until)


class DirectStrategy(Strategy):
    """All that the slots of the instance have, once enough of them have something."""

    def __init__(self, config: Any, signature: Signature) -> None:
        direct = config.sequence_batching.direct
        super().__init__(signature, direct.max_queue_delay_microseconds)
        self.slots = max(int(config.max_batch_size), 1)
        self._enough = direct.minimum_slot_utilization * self.slots

    def choose(self, ready: list[ResponseStream]) -> Choice:
        first = ready[0].request
        batch = [stream for stream in ready if self._signature.batches_with(first, stream.request)]
        if len(batch) < len(ready) or len(ready) >= self._enough:
            return Choice(batch)
        return self._unless_early(batch)


class OldestStrategy(Strategy):
    """Like dynamic batching, among the next requests of the candidates."""

    def __init__(self, config: Any, signature: Signature) -> None:
        oldest = config.sequence_batching.oldest
        super().__init__(signature, oldest.max_queue_delay_microseconds)
        most = max(int(config.max_batch_size), 1)
        self.slots = max(int(oldest.max_candidate_sequences), 1)
        self._most = min(most, self.slots)
        self._preferred = sorted(size for size in oldest.preferred_batch_size if size <= self._most)

    def choose(self, ready: list[ResponseStream]) -> Choice:
        batch: list[ResponseStream] = []
        can_grow = True
        for stream in ready[: self._most]:
            if not self._signature.batches_with(ready[0].request, stream.request):
                can_grow = False
                break
            batch.append(stream)
        size = max((size for size in self._preferred if size <= len(batch)), default=0)
        largest = self._preferred[-1] if self._preferred else self._most
        if size == largest:
            return Choice(batch[:size])
        chosen = batch[:size] if size else batch
        if not can_grow or len(batch) >= self._most:
            return Choice(chosen)
        return self._unless_early(chosen)
