"""Wait for what others bring about: other tasks, threads, processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds until a test gives up. Long, as a machine may stall: who waits goes on as soon as it can."""


async def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return once the condition holds; the loop goes on meanwhile. Raises AssertionError if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        await asyncio.sleep(0.005)


def wait_until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """`until` for tests without a loop, and for threads."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


async def standstill(count: Callable[[], int], most: int, seconds: float = 0.5) -> int:
    """The count once it has not changed for so many seconds, or as soon as it exceeds `most`."""
    seen, since = count(), time.monotonic()
    while seen <= most and time.monotonic() - since < seconds:
        await asyncio.sleep(0.02)
        if count() != seen:
            seen, since = count(), time.monotonic()
    return seen
