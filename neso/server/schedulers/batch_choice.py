"""Which of the requests that wait make a batch, and how long it is worth to wait for more."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from neso.server.inference_response import ResponseStream
from neso.server.signature import Signature


class Choice(NamedTuple):
    """A batch to send, or none and the time to look again, in ns of the monotonic clock; None: when more comes."""

    batch: list[ResponseStream]
    until: int | None = None


NOTHING = Choice([])


class BatchChooser:
    """A batch is sent when one of these holds: it has the largest preferred size that can be reached, it cannot grow
    (`max_size`, or the next request does not fit), or its oldest request has waited for the delay.
    """

    def __init__(self, signature: Signature, max_size: int, preferred: Iterable[int], delay_us: int) -> None:
        """`max_size` and `preferred` are batch sizes; a single request may be larger than them."""
        self._signature = signature
        self._max_size = max_size
        self._preferred = sorted(size for size in preferred if size <= max_size)
        self._largest = self._preferred[-1] if self._preferred else max_size
        self._delay_ns = 1000 * delay_us

    def choose(self, waiting: Iterable[ResponseStream]) -> Choice:
        """Of those that wait, in the order of execution: the first ones, as many as the batch has."""
        batch: list[ResponseStream] = []
        size, best, best_size, can_grow = 0, 0, 0, True
        for stream in waiting:
            if batch and (
                size + stream.batch_size > self._max_size
                or not self._signature.batches_with(batch[0].request, stream.request)
            ):
                can_grow = False
                break
            batch.append(stream)
            size += stream.batch_size
            if size in self._preferred:
                best, best_size = len(batch), size
            if size >= self._max_size:
                can_grow = False
                break
        if not batch:
            return NOTHING
        chosen = batch[:best] if best else batch
        if not can_grow or best_size == self._largest:
            return Choice(chosen)
        return after_delay(chosen, batch, self._delay_ns)


def after_delay(batch: list[ResponseStream], waiting: Sequence[ResponseStream], delay_ns: int) -> Choice:
    """The batch, once the oldest of those that wait for it has waited for so long."""
    if not delay_ns:
        return Choice(batch)
    until = min(stream.timeline.queue_start for stream in waiting) + delay_ns
    return Choice(batch) if time.monotonic_ns() >= until else Choice([], until)
