"""Dynamic batching: requests that wait at the same time are executed together."""

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
    """Calls `dispatch` when it is woken, and when a time passes; nothing polls. Belongs to the core's event loop."""

    def __init__(self, dispatch: Callable[[], None]) -> None:
        self._dispatch = dispatch
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self._stopped = False

    def wake(self) -> None:
        """Dispatch once all that is ready to run has run: requests that come together are batched."""
        if not self._woken and not self._stopped:
            self._woken = True
            asyncio.get_running_loop().call_soon(self._run)

    def wake_at(self, times: Iterable[int | None]) -> None:
        """Dispatch at the first of these times too, in ns of the monotonic clock; those set before are forgotten."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        known = [at for at in times if at is not None]
        if known and not self._stopped:
            seconds = max(min(known) - time.monotonic_ns(), 0) * 1e-9
            self._timer = asyncio.get_running_loop().call_later(seconds, self._run)

    def stop(self) -> None:
        """Dispatch no more."""
        self._stopped = True
        self.wake_at(())

    def _run(self) -> None:
        self._woken = False
        if not self._stopped:
            self._dispatch()


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
