"""Wait for conditions that other tasks, threads or processes cause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds until a test fails. Long, because a busy machine may stall; passing tests end as soon as they can."""


async def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return when the condition is true. The event loop keeps running. Raises `AssertionError` after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """`until` for threads and tests without an event loop."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not hold in time"
        time.sleep(0.005)


async def standstill(count: Callable[[], int], most: int, seconds: float = 0.5) -> int:
    """Return the count when it has not changed for `seconds`, or as soon as it exceeds `most`."""
    seen, since = count(), time.monotonic()
    while seen <= most and time.monotonic() - since < seconds:
        await asyncio.sleep(0.02)
        if count() != seen:
            seen, since = count(), time.monotonic()
    return seen
