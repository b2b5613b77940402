"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from neso.frontends.openai.errors import to_api_error

DONE = b"data: [DONE]\n\n"
SSE_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # disables response buffering in nginx
    ],
}
"""ASGI message that starts a response of events."""


class EventStream:
    """An ASGI application that sends the events of a generator.

    Create it with `open` to start the generator before the response: an exception before the first event then
    propagates and can become an HTTP status. A later exception is sent as the last event.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], first: bytes = b"") -> None:
        self._events = events
        self._first = first

    @classmethod
    async def open(cls, events: AsyncGenerator[bytes, None]) -> EventStream:
        """Wait for the first event. Raises any exception that `events` raises before it."""
        return cls(events, await anext(events))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send(SSE_START)
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            while (event := await self._next()) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        try:
            return await anext(self._events, None)
        except Exception as error:
            return error_event(error)


def error_event(error: Exception) -> bytes:
    """Return the event for an error after the response has started."""
    return b"data: " + to_api_error(error).body() + b"\n\n"
