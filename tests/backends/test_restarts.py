"""Back-off and limits of restarts, in virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import Counter
from virtual_time import run_in_virtual_time

from neso.backends.restarts import MAX_DELAY, Restarts
from neso.server.metrics.registry import MetricsRegistry


class Process:
    """Starts fail until `failures` is 0. Records the times of the starts since the last failure."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.starts: list[float] = []
        self.errors: list[str] = []
        self.counter = Counter("restarts", "", registry=MetricsRegistry())
        self._began = time.monotonic()

    async def start(self) -> Process:
        self.starts.append(round(time.monotonic() - self._began, 2))
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no memory")
        return self

    async def fail(self, restarts: Restarts) -> Process | None:
        """Report an unexpected end, and restart."""
        self._began, self.starts = time.monotonic(), []
        restarts.record_failure()
        return await restarts.restart(self.start, lambda error: self.errors.append(str(error)))


def test_delay_doubles_until_the_process_works():
    async def check() -> None:
        process = Process(failures=3)
        restarts = Restarts(5, process.counter)
        assert await process.fail(restarts) is process
        assert process.starts == [0.0, 0.25, 0.75, 1.75]
        assert process.errors == ["no memory"] * 3
        assert await process.fail(restarts) is process
        assert process.starts == [2.0], "a start alone is no success"
        restarts.record_success()
        await process.fail(restarts)
        assert process.starts == [0.0]
        assert process.counter._value.get() == 3

    run_in_virtual_time(check())


def test_process_stays_down_after_consecutive_failed_starts():
    async def check() -> None:
        process = Process(failures=100)
        assert await process.fail(Restarts(5, process.counter)) is None
        assert len(process.starts) == 5 and process.counter._value.get() == 0

    run_in_virtual_time(check())


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_process_that_fails_too_often_within_the_window_stays_down(limit):
    async def check() -> None:
        process = Process(failures=0)
        restarts = Restarts(limit, process.counter, window=100)
        outcomes = [await process.fail(restarts) for _ in range(limit + 1)]
        assert outcomes == [process] * limit + [None]

    run_in_virtual_time(check())


def test_failures_before_the_window_do_not_count():
    async def check() -> None:
        process = Process(failures=0)
        restarts = Restarts(2, process.counter, window=2)
        for _ in range(10):
            assert await process.fail(restarts) is process
            await asyncio.sleep(1.2)
        process.failures = 100
        assert await process.fail(restarts) is None, "failed starts count too"

    run_in_virtual_time(check())


def test_delay_has_a_maximum():
    process = Process(failures=0)
    restarts = Restarts(5, process.counter)
    for _ in range(2000):
        restarts.record_failure()
    assert restarts.delay == MAX_DELAY


def test_limit_in_a_window_is_known_at_once():
    restarts = Restarts(2, Process(0).counter, window=100)
    for exhausted in (False, False, True):
        restarts.record_failure()
        assert restarts.exhausted is exhausted
