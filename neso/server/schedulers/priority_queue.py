"""Request queue with priorities, timeouts and size limits."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from neso.server.errors import Overloaded, Unavailable
from neso.server.inference_response import ResponseStream


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """Queue policy of a priority level (`ModelQueuePolicy`).

    - delays: execute timed-out requests after the other requests of the level instead of rejecting them
    - timeout_us: queue timeout; 0 for none
    - overridable: requests can set a shorter timeout
    - max_size: maximum number of waiting requests; 0 for no limit
    """

    delays: bool = False
    timeout_us: int = 0
    overridable: bool = False
    max_size: int = 0

    @classmethod
    def of(cls, message: Any) -> QueuePolicy:
        return cls(
            message.timeout_action == message.DELAY,
            message.default_timeout_microseconds,
            message.allow_timeout_override,
            message.max_queue_size,
        )

    def deadline(self, stream: ResponseStream) -> int | None:
        """Return the time when the request times out, in ns of the monotonic clock; None for never."""
        timeout = self.timeout_us
        requested = stream.request.timeout_us
        if self.overridable and requested and (not timeout or requested < timeout):
            timeout = requested
        return stream.timeline.queue_start + 1000 * timeout if timeout else None


@dataclass(slots=True, eq=False)
class _Level:
    policy: QueuePolicy
    waiting: deque[ResponseStream] = field(default_factory=deque)
    delayed: deque[ResponseStream] = field(default_factory=deque)

    def is_full(self) -> bool:
        most = self.policy.max_size
        return bool(most) and len(self.waiting) + len(self.delayed) >= most


class PriorityQueue:
    """Requests ordered by priority level (1 first), then by arrival; delayed requests are last within a level.

    Cancelled and timed-out requests, whose responses were already sent, are skipped.
    """

    def __init__(
        self, num_levels: int, default_level: int, policies: dict[int, QueuePolicy], default: QueuePolicy
    ):
        self._num_levels = max(num_levels, 1)
        self._policies = {
            level: policy for level, policy in policies.items() if 1 <= level <= self._num_levels
        }
        self._default_policy = default
        # Levels are created by their first request: a configuration can have up to 2^64 - 1 levels.
        self._levels: dict[int, _Level] = {}
        self._queues: list[deque[ResponseStream]] = []  # in execution order
        self._default_priority = default_level if 1 <= default_level <= self._num_levels else 1
        self._deadlines: list[tuple[int, int, ResponseStream]] = []
        self._with_deadline: dict[ResponseStream, _Level] = {}  # waiting requests with a deadline
        self._arrivals = 0
        policies_in_use = [*self._policies.values()]
        if len(policies_in_use) < self._num_levels:
            policies_in_use.append(default)
        self._bounded = any(policy.max_size for policy in policies_in_use)
        self._timed = any(policy.timeout_us or policy.overridable for policy in policies_in_use)
        self._has_closed = False  # whether requests were closed since closed requests were last removed

    @classmethod
    def of(cls, batching: Any) -> PriorityQueue:
        """Create from a `ModelDynamicBatching` message."""
        policies = {
            level: QueuePolicy.of(message) for level, message in batching.priority_queue_policy.items()
        }
        return cls(
            batching.priority_levels,
            batching.default_priority_level,
            policies,
            QueuePolicy.of(batching.default_queue_policy),
        )

    def put(self, stream: ResponseStream) -> None:
        """Add a request; the default replaces an unknown priority. Raises `Overloaded` when the level is full."""
        level = self._level(stream.request.priority)
        if self._bounded:
            self._check_capacity(level, stream)
        level.waiting.append(stream)
        if self._timed and (deadline := level.policy.deadline(stream)) is not None:
            self._arrivals += 1
            self._with_deadline[stream] = level
            heapq.heappush(self._deadlines, (deadline, self._arrivals, stream))

    def _level(self, priority: int) -> _Level:
        """Return the level of a priority, or the default level if there is no such level."""
        if not 1 <= priority <= self._num_levels:
            priority = self._default_priority
        if priority not in self._levels:
            self._levels[priority] = _Level(self._policies.get(priority, self._default_policy))
            self._queues = [
                queue for _, level in sorted(self._levels.items()) for queue in (level.waiting, level.delayed)
            ]
        return self._levels[priority]

    def _check_capacity(self, level: _Level, stream: ResponseStream) -> None:
        """Raise `Overloaded` when the level is full."""
        if level.is_full() and self._has_closed:
            self._remove_closed()
        if level.is_full():
            raise Overloaded(
                f"[request id: {stream.request.id or '<id_unknown>'}] Exceeds maximum queue size"
            )
        stream.request.on_cancel(self._mark_closed)

    def waiting(self) -> Iterator[ResponseStream]:
        """Yield the open requests in execution order."""
        for queue in self._queues:
            for stream in queue:
                if not stream.closed:
                    yield stream

    def take(self, count: int) -> None:
        """Remove the first `count` open requests, and the closed requests before them."""
        for queue in self._queues:
            while queue and (count or queue[0].closed):
                stream = queue.popleft()
                if not stream.closed:
                    count -= 1
                if self._with_deadline:
                    self._with_deadline.pop(stream, None)
            if not count:
                return

    def expire(self) -> None:
        """Reject or delay requests that have timed out."""
        if not self._deadlines:
            return
        now = time.monotonic_ns()
        while self._deadlines and self._deadlines[0][0] <= now:
            stream = heapq.heappop(self._deadlines)[2]
            level = self._with_deadline.pop(stream, None)
            if level is None or stream.closed:
                continue
            if level.policy.delays:
                level.waiting.remove(stream)
                level.delayed.append(stream)
            else:
                self._has_closed = True
                stream.reject(Unavailable("Request timeout expired"))  # Triton's message has no request id

    def _mark_closed(self) -> None:
        self._has_closed = True

    def _remove_closed(self) -> None:
        """Remove cancelled and timed-out requests, which do not count against the limit."""
        self._has_closed = False
        for queue in self._queues:
            if any(stream.closed for stream in queue):
                open_streams = [stream for stream in queue if not stream.closed]
                queue.clear()
                queue.extend(open_streams)

    def next_deadline(self) -> int | None:
        """Return the earliest deadline, in ns of the monotonic clock; None if no request has a deadline."""
        while self._deadlines:
            deadline, _, stream = self._deadlines[0]
            if stream in self._with_deadline and not stream.closed:
                return deadline
            self._with_deadline.pop(stream, None)
            heapq.heappop(self._deadlines)
        return None

    def clear(self) -> list[ResponseStream]:
        """Remove and return all waiting requests."""
        left = list(self.waiting())
        for queue in self._queues:
            queue.clear()
        self._deadlines.clear()
        self._with_deadline.clear()
        return left
