"""Answers as server-sent events, written so that a token costs little."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from neso.frontends.openai.errors import to_api_error

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx holds the events back
]


class ChunkWriter:
    """Writes the chunks of one answer. What all of them share is serialized once."""

    def __init__(self, envelope: dict[str, Any], *, include_usage: bool) -> None:
        self._head = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":['
        self._has_usage = include_usage
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def chunk(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        """A chunk with one choice, and perhaps further fields, such as the usage so far."""
        if not extra:
            return self._head + orjson.dumps(choice) + self._tail
        if self._has_usage:
            extra = {"usage": None, **extra}
        return self._head + orjson.dumps(choice) + b"]," + orjson.dumps(extra)[1:] + b"\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The chunk that ends a stream whose client asked for usage: it has no choices."""
        return self._head + b'],"usage":' + orjson.dumps(usage) + b"}\n\n"


class EventStream:
    """A response of events, itself an ASGI application that sends them.

    Make it with `open`, which waits for the first event: until then an error can still be an HTTP status.
    """

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        self._first = first
        self._events = events

    @classmethod
    async def open(cls, events: AsyncGenerator[bytes, None]) -> EventStream:
        """Start the stream. Raises whatever `events` raises before its first event."""
        return cls(await anext(events), events)

    @classmethod
    def of(cls, events: AsyncGenerator[bytes, None]) -> EventStream:
        """A stream that begins at once, and may have no events."""
        return cls(b"", events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            while (event := await self._next()) is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes | None:
        """The next event; an error is the last one, since the status is sent already."""
        try:
            return await anext(self._events, None)
        except Exception as error:
            return b"data: " + to_api_error(error).body() + b"\n\n"
