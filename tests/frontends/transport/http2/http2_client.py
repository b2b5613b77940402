"""A server connection on a fake transport, with hyper's h2 as its client."""

from __future__ import annotations

import asyncio
from typing import Any

import h2.config
import h2.connection
import h2.events

from neso.frontends.transport.http2 import (
    Http2Connection,
    Http2Options,
    Http2Stream,
    ServerContext,
    StreamEvents,
    encode_headers,
)
from neso.frontends.transport.http2.frames import frame_header
from neso.frontends.transport.http2.headers import Headers

REQUEST = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/echo"),
    (":authority", "test"),
    ("content-type", "text/plain"),
]
POST = bytes.fromhex("838684")  # POST, http, / in the static table
HEAD = encode_headers([(b":status", b"200")])
TRAILERS = encode_headers([(b"done", b"yes")])


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame, valid or not."""
    return frame_header(len(payload), kind, flags, stream) + payload


class FakeTransport(asyncio.Transport):
    """Stores the written data. `stalled`: the client does not read, so the write buffer fills."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.unsent = 0
        self.stalled = self.closed = self.aborted = self.eof = False
        self.reading = True
        self.protocol: Http2Connection
        self.high = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("::1", 5) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def write(self, data: Any) -> None:
        assert not self.eof, "written after the end"
        self.written += data
        if self.stalled:
            before, self.unsent = self.unsent, self.unsent + len(data)
            if before <= self.high < self.unsent:
                self.protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def flow(self) -> None:
        """Let the client read everything."""
        self.stalled, full, self.unsent = False, self.unsent > self.high, 0
        if full:
            self.protocol.resume_writing()

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def take(self) -> bytes:
        data = bytes(self.written)
        self.written.clear()
        return data


class Echo:
    """Application that returns each body. `log`: events by stream."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.streams: dict[int, Http2Stream] = {}
        self.hold = False  # do not respond

    def __call__(self, stream: Http2Stream, headers: Headers) -> StreamEvents:
        self.log.append(("begin", stream.number))
        self.streams[stream.number] = stream
        return EchoEvents(self, stream)

    def of(self, event: str) -> list[int]:
        return [number for name, number in self.log if name == event]


class EchoEvents:
    def __init__(self, echo: Echo, stream: Http2Stream) -> None:
        self.echo, self.stream, self.body = echo, stream, b""

    def on_data(self, data: bytes) -> None:
        self.body += data
        self.stream.consumed(len(data))

    def on_end(self) -> None:
        self.echo.log.append(("end", self.stream.number))
        if not self.echo.hold:
            self.stream.send(HEAD, self.body, TRAILERS)

    def on_reset(self) -> None:
        self.echo.log.append(("reset", self.stream.number))


class Client:
    """`events`: all events that h2 parsed from the server's frames; h2 raises on protocol errors."""

    def __init__(self, options: Http2Options) -> None:
        self.echo = Echo()
        self.context = ServerContext(self.echo, options)
        self.server = Http2Connection(self.context)
        self.transport = FakeTransport()
        self.transport.protocol = self.server
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.events: list[Any] = []
        self.server.connection_made(self.transport)

    def greet(self) -> Client:
        self.h2.initiate_connection()
        self.pump()
        return self

    def pump(self) -> list[Any]:
        """Exchange bytes until both sides are idle; returns the new events."""
        fresh: list[Any] = []
        while True:
            out = self.h2.data_to_send()
            if out:
                self.server.data_received(out)
            back = self.transport.take()
            if back:
                fresh += self.h2.receive_data(back)
            if not out and not back:
                self.events += fresh
                return fresh

    def raw(self, *data: bytes) -> list[Any]:
        """Send bytes that bypass h2; returns the events of the response."""
        self.server.data_received(b"".join(data))
        fresh = self.h2.receive_data(self.transport.take())
        self.events += fresh
        return fresh

    def request(self, body: bytes = b"", headers: list[tuple[str, str]] = REQUEST, end: bool = True) -> int:
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, headers, end_stream=end and not body)
        if body:
            self.h2.send_data(number, body, end_stream=end)
        self.pump()
        return number

    def body(self, number: int) -> bytes:
        return b"".join(event.data for event in self.of(h2.events.DataReceived) if event.stream_id == number)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def goaway(self) -> tuple[int, bytes]:
        """Return code and message of the last GOAWAY."""
        event = self.of(h2.events.ConnectionTerminated)[-1]
        return int(event.error_code), event.additional_data or b""

    def resets(self) -> dict[int, int]:
        """Return error codes by stream."""
        return {event.stream_id: int(event.error_code) for event in self.of(h2.events.StreamReset)}
