"""A clock that jumps to the next timer when the event loop is idle: sleeps cost nothing and timers fire in order."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any

import pytest


class VirtualTime:
    """Replaces the monotonic clock of `time`, and with it the clock of the running asyncio event loop.

    Time advances only while no task is ready, to the next timer. Use it for code without threads, sockets and
    processes: their work would take no virtual time.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._ns = time.monotonic_ns()
        selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def jump(timeout: float | None = None) -> Any:
            if timeout is None or timeout <= 0:
                return select(timeout)
            events = select(0)
            if not events:
                self._ns += math.ceil(timeout * 1e9)
            return events

        patch.setattr(selector, "select", jump)
        patch.setattr(time, "monotonic_ns", self.now)
        patch.setattr(time, "monotonic", lambda: self.now() * 1e-9)

    def now(self) -> int:
        """Return nanoseconds, increasing with each call."""
        self._ns += 1
        return self._ns


def run_in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` in virtual time. Raises `TimeoutError` after 20 s."""

    async def play() -> None:
        with pytest.MonkeyPatch.context() as patch:
            VirtualTime(patch)
            await asyncio.wait_for(work, 20)

    asyncio.run(play())
