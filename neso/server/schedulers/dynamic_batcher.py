"""Dynamic batching: requests that wait at the same time are executed together.

Batches are made by `BatchChooser` when an instance is free and, with a rate limiter, may begin. Nothing polls:
arrivals, instances that become free and one timer drive it. A model without `dynamic_batching` whose executions are
limited waits here too, one request a batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from neso.server.errors import ServerError
from neso.server.inference_response import ResponseStream
from neso.server.rate_limiter.limiter import LimitedInstances
from neso.server.schedulers.batch_choice import BatchChooser
from neso.server.schedulers.dispatcher import Dispatcher
from neso.server.schedulers.priority_queue import PriorityQueue
from neso.server.signature import Signature

Execute = Callable[[list[ResponseStream], Callable[[], None], int | None], None]
"""execute(batch, done, instance): start on that instance, or with None on a free one; `done` is called on the loop when
the instance is free again."""


class DynamicBatcher:
    """Made and used on the core's event loop."""

    def __init__(
        self,
        config: Any,
        signature: Signature,
        execute: Execute,
        num_instances: int,
        limited: LimitedInstances | None = None,
    ) -> None:
        batching = config.dynamic_batching
        max_size = max(int(config.max_batch_size), 1) if config.HasField("dynamic_batching") else 1
        self._queue = PriorityQueue.of(batching)
        self._chooser = BatchChooser(
            signature, max_size, batching.preferred_batch_size, batching.max_queue_delay_microseconds
        )
        self._execute = execute
        self._free = num_instances
        self._order = ResponseOrder() if batching.preserve_ordering else None
        self._dispatcher = Dispatcher(self._dispatch)
        self._limited = limited
        if limited is not None:
            limited.on_grant = self._dispatcher.wake

    def submit(self, stream: ResponseStream) -> None:
        """Queue a request; one that is not taken is answered."""
        try:
            self._queue.put(stream)
        except ServerError as error:
            stream.reject(error)
            return
        if self._order is not None:
            self._order.add(stream)
        stream.fail_if_cancelled_while_waiting()
        self._schedule()

    def close(self) -> list[ResponseStream]:
        """Stop; gives back what was not sent."""
        self._dispatcher.stop()
        if self._limited is not None:
            self._limited.withdraw_all()
        return self._queue.clear()

    def add_instances(self, count: int) -> None:
        """There are so many more instances, or fewer if negative."""
        self._free += count  # below zero until as many have finished what they do
        self._schedule()

    def _schedule(self) -> None:
        if self._free > 0:
            self._dispatcher.wake()
        else:
            self._dispatcher.wake_at((self._queue.next_deadline(),))  # for the patience of those who wait

    def _dispatch(self) -> None:
        self._queue.expire()
        until = None
        while self._free > 0:
            batch, until = self._chooser.choose(self._queue.waiting())
            if not batch:
                if self._limited is not None:
                    self._limited.withdraw_all()
                break
            instance = None
            if self._limited is not None:
                instance = self._limited.take_any()
                if (
                    instance is None
                ):  # it tells when one may begin; more requests may join the batch until then
                    break
            self._queue.take(len(batch))
            self._free -= 1
            self._execute(batch, partial(self._instance_is_free, instance), instance)
        self._dispatcher.wake_at((self._queue.next_deadline(), until))

    def _instance_is_free(self, instance: int | None) -> None:
        self._free += 1
        if self._limited is not None and instance is not None:
            self._limited.release(instance)
        self._schedule()


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
