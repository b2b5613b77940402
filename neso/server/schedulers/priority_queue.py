"""Requests that wait for an instance: by priority, with timeouts and limits on their number."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from neso.server.errors import InvalidArgument, Unavailable
from neso.server.inference_response import ResponseStream


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What happens to those who wait; a `ModelQueuePolicy` message.

    - delays: whether a request whose time is over is executed after all others, instead of refused
    - timeout_us: how long a request may wait; 0: for ever
    - overridable: whether a request may ask for a shorter time
    - max_size: most requests that wait; 0: no limit
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
        """When the request's time is over, in ns of the monotonic clock."""
        timeout = self.timeout_us
        asked = stream.request.timeout_us
        if self.overridable and asked and (not timeout or asked < timeout):
            timeout = asked
        return stream.timeline.queue_start + 1000 * timeout if timeout else None


@dataclass(slots=True)
class _Level:
    policy: QueuePolicy
    waiting: deque[ResponseStream] = field(default_factory=deque)
    delayed: deque[ResponseStream] = field(default_factory=deque)


class PriorityQueue:
    """Levels from 1, the first to be executed, in order of arrival within each; delayed requests come last.

    A request that was cancelled or timed out is answered and skipped when its turn comes.
    """

    def __init__(
        self, num_levels: int, default_level: int, policies: dict[int, QueuePolicy], default: QueuePolicy
    ):
        self._levels = {
            level: _Level(policies.get(level, default)) for level in range(1, max(num_levels, 1) + 1)
        }
        self._default_level = default_level or 1
        self._deadlines: list[tuple[int, int, ResponseStream]] = []
        self._arrivals = 0

    @classmethod
    def of(cls, batching: Any) -> PriorityQueue:
        """By a `ModelDynamicBatching` message."""
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
        """Raises `InvalidArgument` for a priority that the model does not have, `Unavailable` when it is full."""
        priority = stream.request.priority or self._default_level
        if len(self._levels) == 1:
            priority = 1
        level = self._levels.get(priority)
        if level is None:
            raise InvalidArgument(
                f"priority level must be between 1 and {len(self._levels)}, got {priority} "
                f"for model '{stream.request.model_name}'"
            )
        if level.policy.max_size and len(level.waiting) + len(level.delayed) >= level.policy.max_size:
            raise Unavailable(
                f"[request id: {stream.request.id or '<id_unknown>'}] Exceeds maximum queue size"
            )
        level.waiting.append(stream)
        deadline = level.policy.deadline(stream)
        if deadline is not None:
            self._arrivals += 1
            heapq.heappush(self._deadlines, (deadline, self._arrivals, stream))

    def waiting(self) -> Iterator[ResponseStream]:
        """Those that are still wanted, in the order of execution."""
        for level in self._levels.values():
            yield from (stream for stream in level.waiting if not stream.closed)
        for level in self._levels.values():
            yield from (stream for stream in level.delayed if not stream.closed)

    def take(self, streams: list[ResponseStream]) -> None:
        """Remove some that `waiting` gave, and those before them that have ended."""
        taken = set(map(id, streams))
        for level in self._levels.values():
            for queue in (level.waiting, level.delayed):
                while queue and (id(queue[0]) in taken or queue[0].closed):
                    taken.discard(id(queue.popleft()))
                if taken and any(id(stream) in taken for stream in queue):
                    kept = [stream for stream in queue if id(stream) not in taken]
                    queue.clear()
                    queue.extend(kept)

    def expire(self) -> None:
        """Refuse or delay the requests whose time is over."""
        now = time.monotonic_ns()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, stream = heapq.heappop(self._deadlines)
            for level in self._levels.values():
                if stream not in level.waiting:
                    continue
                if level.policy.delays:
                    level.waiting.remove(stream)
                    level.delayed.append(stream)
                elif not stream.closed:
                    stream.reject(
                        Unavailable(
                            f"[request id: {stream.request.id or '<id_unknown>'}] Request timeout expired"
                        )
                    )

    def next_deadline(self) -> int | None:
        """The earliest time at which `expire` has something to do, in ns of the monotonic clock."""
        while self._deadlines and (
            self._deadlines[0][2].closed or self._deadlines[0][2].timeline.compute_start
        ):
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def clear(self) -> list[ResponseStream]:
        """Take all that wait."""
        left = list(self.waiting())
        for level in self._levels.values():
            level.waiting.clear()
            level.delayed.clear()
        self._deadlines.clear()
        return left
