"""Targets of requests: a server over HTTP or gRPC, or an engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from neso.perf.endpoints.base import History
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

OnFirstOutput = Callable[[], None]
"""Called when the first output of a response has arrived."""


class Target(Protocol):
    """Sends requests and fills their records. It belongs to one event loop."""

    async def send(
        self,
        request: PerfRequest,
        record: RequestRecord,
        history: History,
        cancel_after: float | None = None,
        on_first_output: OnFirstOutput | None = None,
    ) -> None:
        """Send a request to `record.model` and return when its response is complete, failed or cancelled.

        Failures are noted in the record, not raised. `cancel_after`: cancel it so many seconds after it was sent.
        `on_first_output` may be left out for a response that is not streamed or failed.
        """

    def message(self, request: PerfRequest) -> dict[str, Any]:
        """Return the user message of a turn, for the history."""

    def cancel_all(self) -> None:
        """Cancel all requests in flight; their `send` returns."""

    def end_session(self, session: str) -> None:
        """Release what is kept for a session."""

    async def close(self) -> None:
        """Close connections."""


class TaskTarget:
    """Base of targets that exchange each request in a task and keep nothing for a session."""

    def __init__(self) -> None:
        self._active: set[asyncio.Task[None]] = set()

    async def _run(
        self, exchange: Coroutine[Any, Any, None], record: RequestRecord, cancel_after: float | None
    ) -> None:
        """Await the exchange of a request, at most `cancel_after` seconds. Sets its start and its end."""
        record.start_ns = time.monotonic_ns()
        task = asyncio.ensure_future(exchange)
        self._active.add(task)
        loop = asyncio.get_running_loop()
        timer = None if cancel_after is None else loop.call_later(cancel_after, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            record.cancelled = True
        finally:
            self._active.discard(task)
            if timer is not None:
                timer.cancel()
            record.end_ns = time.monotonic_ns()

    def message(self, request: PerfRequest) -> dict[str, Any]:
        return {"role": "user", "content": request.text}

    def cancel_all(self) -> None:
        for task in list(self._active):
            task.cancel()

    def end_session(self, session: str) -> None:
        pass
