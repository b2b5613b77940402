"""Restarts of processes that end unexpectedly: exponential back-off, and a limit on the number of attempts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prometheus_client import Counter

from neso.server.metrics.registry import Family, ModelMetrics

MIN_DELAY, MAX_DELAY = 0.25, 30.0
"""In seconds. The first restart is immediate; then the delay starts at the minimum and doubles with each failure."""

RESTARTS = Family(
    "neso_process_restarts_total",
    "counter",
    "Restarts of processes that ended unexpectedly: the engine of a model, or the instances of a Python model.",
)

Process = TypeVar("Process")


def restart_counter(metrics: ModelMetrics) -> Counter:
    """Return the counter of the successful restarts of a model's processes."""
    return metrics.counter(RESTARTS)


class Restarts:
    """Failures of one process, from which the delay of its next start follows.

    - limit: without `window`, the number of consecutive failed starts after which the process stays down; with
      `window`, the number of failures (unexpected ends and failed starts) in that time that are tolerated
    - counter: counts the restarts
    - window: failures count for this number of seconds; None: until `record_success`
    """

    def __init__(self, limit: int, counter: Counter, window: float | None = None) -> None:
        self._limit, self._counter, self._window = limit, counter, window
        self._failures: deque[float] = deque()

    def record_failure(self) -> None:
        """Record that the process has ended unexpectedly, or could not be started."""
        self._failures.append(time.monotonic())

    def record_success(self) -> None:
        """Record that the process works: the restart after the next failure is immediate."""
        self._failures.clear()

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        count = self._count()
        return 0.0 if count <= 1 else float(min(MIN_DELAY * 2 ** min(count - 2, 30), MAX_DELAY))

    @property
    def exhausted(self) -> bool:
        """Whether there were more failures than the limit in the window; always False without a window."""
        return self._window is not None and self._count() > self._limit

    async def restart(
        self, start: Callable[[], Awaitable[Process]], failed: Callable[[Exception], None]
    ) -> Process | None:
        """Call `start` after the delay, until it succeeds. Returns None when the limit is exceeded.

        `failed` is called with each exception of `start`.
        """
        failed_starts = 0
        while not (self.exhausted if self._window is not None else failed_starts >= self._limit):
            await asyncio.sleep(self.delay)
            try:
                process = await start()
            except Exception as error:
                failed_starts += 1
                self.record_failure()
                failed(error)
            else:
                self._counter.inc()
                return process
        return None

    def _count(self) -> int:
        if self._window is not None:
            oldest = time.monotonic() - self._window
            while self._failures and self._failures[0] < oldest:
                self._failures.popleft()
        return len(self._failures)
