"""Dynamic batching: waiting requests are executed together.

`BatchChooser` forms a batch when an instance is free and the rate limiter, if any, admits the execution. Driven by
arriving requests, freed instances and one timer. Rate-limited models without `dynamic_batching` also use this module,
with batches of one request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from neso.server.errors import ServerError
from neso.server.inference_response import ResponseStream
from neso.server.schedulers.priority_queue import PriorityQueue
from neso.server.signature import Signature

if TYPE_CHECKING:
    from neso.server.rate_limiter.limiter import LimitedInstances


class Dispatcher:
    """Calls `dispatch` after `wake`, and at times set by `wake_at`. Used on the core's loop."""

    def __init__(self, dispatch: Callable[[], None]) -> None:
        self._dispatch = dispatch
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self._stopped = False

    def wake(self) -> None:
        """Dispatch in the next iteration of the event loop, so that simultaneous requests are batched."""
        if not self._woken and not self._stopped:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._run)

    def wake_at(self, times: Iterable[int | None]) -> None:
        """Also dispatch at the earliest of these times, in ns of the monotonic clock; replaces earlier times."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        known = list(filter(None, times))
        if known and not self._stopped:
            seconds = max(min(known) - time.monotonic_ns(), 0) * 1e-9
            self._timer = asyncio.get_running_loop().call_later(seconds, self._run)

    def stop(self) -> None:
        """Stop dispatching."""
        self._stopped = True
        self.wake_at(())

    def dispatch_now(self) -> None:
        """Dispatch, unless stopped."""
        if not self._stopped:
            self._dispatch()

    def _run(self) -> None:
        self._woken = False
        self.dispatch_now()


class BatchChoice(NamedTuple):
    """A batch to execute, or an empty batch and the time of the next attempt, in ns; None: at the next arrival."""

    batch: list[ResponseStream]
    until: int | None = None


NO_BATCH = BatchChoice([])


class BatchChooser:
    """Decides when a batch is complete, in this order:

    - At a preferred size, which it executes immediately; the largest that the waiting requests reach.
    - When the next request would exceed the largest preferred size, or cannot be added.
    - When its oldest request has waited for the delay. It then has all waiting requests that fit.
    """

    def __init__(self, signature: Signature, max_size: int, preferred: Iterable[int], delay_us: int) -> None:
        """Create a chooser. `max_size` and `preferred` are batch sizes; a single request can be larger."""
        self._signature = signature
        self._max_size = max_size
        self._preferred = frozenset(size for size in preferred if size <= max_size)
        self._largest = max(self._preferred, default=max_size)
        self._delay_ns = 1000 * delay_us

    def choose(self, waiting: Iterable[ResponseStream]) -> BatchChoice:
        """Choose a batch: a prefix of the waiting requests, which are in execution order."""
        batch: list[ResponseStream] = []
        size, preferred_count, can_grow = 0, 0, True
        for stream in waiting:
            grown = size + stream.batch_size
            if batch:
                if grown > self._largest and not preferred_count:
                    preferred_count = len(batch)
                if grown > self._max_size or not self._signature.batches_with(
                    batch[0].request, stream.request
                ):
                    can_grow = False
                    break
            batch.append(stream)
            size = grown
            if size in self._preferred:
                preferred_count = len(batch)
            if size >= self._max_size:
                break
        if not batch:
            return NO_BATCH
        after = after_delay(batch, batch, self._delay_ns)
        delay_is_over = bool(self._delay_ns and after.batch)
        if preferred_count and not delay_is_over:
            return BatchChoice(batch[:preferred_count])
        if not can_grow or size >= self._largest:
            return BatchChoice(batch)
        return after


def after_delay(batch: list[ResponseStream], waiting: Sequence[ResponseStream], delay_ns: int) -> BatchChoice:
    """Return the batch once the oldest waiting request has waited for `delay_ns`; until then, that time."""
    if not delay_ns:
        return BatchChoice(batch)
    until = min(stream.timeline.queue_start for stream in waiting) + delay_ns
    return BatchChoice(batch) if time.monotonic_ns() >= until else BatchChoice([], until)


Execute = Callable[[list[ResponseStream], Callable[[], None], int | None], None]
"""execute(batch, done, instance): start on an instance, or for None on any free instance; `done` is called on the loop
when the instance is free again."""


class DynamicBatcher:
    """The dynamic batcher of one model. Used on the core's loop."""

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
            limited.on_release = self._dispatcher.dispatch_now

    def submit(self, stream: ResponseStream) -> None:
        """Queue a request, or reject it."""
        try:
            self._queue.put(stream)
        except ServerError as error:
            stream.reject(error)
            return
        if self._order is not None:
            self._order.add(stream)
        stream.request.on_cancel(stream.fail_if_queued)
        self._schedule()

    def close(self) -> list[ResponseStream]:
        """Stop and return the requests that were not executed."""
        self._dispatcher.stop()
        if self._limited is not None:
            self._limited.cancel_all()
        return self._queue.clear()

    def add_instances(self, count: int) -> None:
        """Change the number of instances by `count`, which can be negative."""
        self._free += count  # negative until enough instances have finished
        self._schedule()

    def _schedule(self) -> None:
        if self._free > 0:
            self._dispatcher.wake()
        else:
            self._dispatcher.wake_at((self._queue.next_deadline(),))  # for queue timeouts

    def _dispatch(self) -> None:
        self._queue.expire()
        until = None
        while self._free > 0:
            batch, until = self._chooser.choose(self._queue.waiting())
            if not batch:
                if self._limited is not None:
                    self._limited.cancel_all()
                break
            instance = None
            if self._limited is not None:
                instance = self._limited.acquire_any()
                if instance is None:  # wait for `on_grant`; the batch can grow until then
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
    """Delivers responses in the order of their requests (`preserve_ordering`)."""

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
