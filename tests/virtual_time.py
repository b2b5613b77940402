"""Time that passes when everybody waits: what sleeps costs nothing, and timers go off in order on any machine."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine
from typing import Any

import pytest


class VirtualTime:
    """Stands in for the monotonic clock of `time`, and with it for that of the running asyncio event loop.

    It moves only while no task can go on, at once to the next timer. For code without threads, sockets and
    processes: what they do would take no time.
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
        """Nanoseconds. No two calls get the same."""
        self._ns += 1
        return self._ns


def run_in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` for tests that play several times. Raises TimeoutError if it takes longer than 20 s."""

    async def play() -> None:
        with pytest.MonkeyPatch.context() as patch:
            VirtualTime(patch)
            await asyncio.wait_for(work, 20)

    asyncio.run(play())
