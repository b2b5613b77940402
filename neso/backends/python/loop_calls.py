"""Calls from other threads on the core's loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_here = threading.local()


class LoopCalls:
    """Has functions called on an event loop, in order, by any thread; the loop is woken once for those that wait.

    Waking it takes the time of several calls, and a batch of requests ends with one for each of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call it soon. Of no effect once the loop has ended."""
        self._waiting.append((function, arguments))
        # Whoever finds it set has appended before `_run` takes what waits.
        if not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                logger.debug("a call came after the server's end")

    def _run(self) -> None:
        self._woken = False
        waiting = self._waiting
        while waiting:
            function, arguments = waiting.popleft()
            try:
                function(*arguments)
            except Exception:
                logger.exception("a call on the server's loop failed")


def running_loop_calls() -> LoopCalls:
    """Those of the event loop that runs this thread."""
    loop = asyncio.get_running_loop()
    known: LoopCalls | None = getattr(_here, "calls", None)
    if known is None or known.loop is not loop:
        known = _here.calls = LoopCalls(loop)
    return known
