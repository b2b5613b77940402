"""Which of the requests that sequences have ready make a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from neso.server.inference_response import ResponseStream
from neso.server.schedulers.batch_choice import BatchChooser, Choice, after_delay
from neso.server.signature import Signature


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
