"""Dynamic batching: requests that wait at the same time are executed together.

A batch is sent when an instance is free and one of these holds: it has the largest preferred size that can be reached,
it cannot grow (`max_batch_size`, or the next request does not fit), or its oldest request has waited for
`max_queue_delay_microseconds`. Nothing polls: arrivals, instances that become free and one timer drive it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from neso.server.errors import ServerError
from neso.server.inference_response import ResponseStream
from neso.server.schedulers.dispatcher import Dispatcher
from neso.server.schedulers.priority_queue import PriorityQueue
from neso.server.signature import Signature

Execute = Callable[[list[ResponseStream], Callable[[], None]], None]
"""execute(batch, done): start on a free instance; `done` is called on the loop when the instance is free again."""


class DynamicBatcher:
    """Made and used on the core's event loop."""

    def __init__(self, config: Any, signature: Signature, execute: Execute, num_instances: int) -> None:
        batching = config.dynamic_batching
        self._queue = PriorityQueue.of(batching)
        self._signature = signature
        self._execute = execute
        self._free = num_instances
        self._max_size = max(int(config.max_batch_size), 1)
        self._preferred = sorted(size for size in batching.preferred_batch_size if size <= self._max_size)
        self._delay_ns = 1000 * batching.max_queue_delay_microseconds
        self._order = ResponseOrder() if batching.preserve_ordering else None
        self._dispatcher = Dispatcher(self._dispatch)

    def submit(self, stream: ResponseStream) -> None:
        """Queue a request; one that is not taken is answered."""
        try:
            self._queue.put(stream)
        except ServerError as error:
            stream.reject(error)
            return
        stream.fail_if_cancelled_while_waiting()
        if self._order is not None:
            self._order.add(stream)
        self._schedule()

    def close(self) -> list[ResponseStream]:
        """Stop; gives back what was not sent."""
        self._dispatcher.stop()
        return self._queue.clear()

    def add_instances(self, count: int) -> None:
        """There are so many more instances, or fewer if negative."""
        self._free += count  # below zero until as many have finished what they do
        self._schedule()

    def _schedule(self) -> None:
        if self._free > 0:
            self._dispatcher.wake()
        else:
            self._set_timer()  # for the patience of those who wait

    def _dispatch(self) -> None:
        self._queue.expire()
        while self._free > 0 and (batch := self._next_batch()):
            self._queue.take(batch)
            self._free -= 1
            self._execute(batch, self._instance_is_free)
        self._set_timer()

    def _instance_is_free(self) -> None:
        self._free += 1
        self._schedule()

    def _next_batch(self) -> list[ResponseStream]:
        """What to send now; nothing if it is worth to wait."""
        batch: list[ResponseStream] = []
        size, best, best_size, can_grow = 0, 0, 0, True
        for stream in self._queue.waiting():
            if size + stream.batch_size > self._max_size or (
                batch and not self._signature.batches_with(batch[0].request, stream.request)
            ):
                can_grow = False
                break
            batch.append(stream)
            size += stream.batch_size
            if size in self._preferred:
                best, best_size = len(batch), size
        if not batch:
            return []
        largest = self._preferred[-1] if self._preferred else self._max_size
        if best_size == largest:
            return batch[:best]
        if not can_grow or size >= self._max_size or self._waited_enough(batch):
            return batch[:best] if best else batch
        return []

    def _waited_enough(self, batch: list[ResponseStream]) -> bool:
        if not self._delay_ns:
            return True
        oldest = min(stream.timeline.queue_start for stream in batch)
        return bool(time.monotonic_ns() >= oldest + self._delay_ns)

    def _set_timer(self) -> None:
        """For the next time that passes: of a batch that waits to grow, or of a request's patience."""
        self._dispatcher.wake_at((self._queue.next_deadline(), self._end_of_delay()))

    def _end_of_delay(self) -> int | None:
        if not self._delay_ns or self._free <= 0:
            return None
        first = next(self._queue.waiting(), None)
        return None if first is None else first.timeline.queue_start + self._delay_ns


class ResponseOrder:
    """Responses leave in the order in which their requests came, whichever instance is done first."""

    def __init__(self) -> None:
        self._streams: deque[ResponseStream] = deque()

    def add(self, stream: ResponseStream) -> None:
        stream.on_close = self._advance
        if self._streams:
            stream.hold()
        self._streams.append(stream)

    def _advance(self) -> None:
        while self._streams and self._streams[0].closed:
            self._streams.popleft()
            if self._streams:
                self._streams[0].release()
