"""One stream: a request and its response."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from neso.frontends.http2.frames import (
    DATA,
    END_STREAM,
    MAX_WINDOW,
    ErrorCode,
    StreamFault,
    frame_header,
    reset_frame,
    window_update,
)
from neso.frontends.http2.headers import Headers
from neso.frontends.http2.receive_window import ReceiveWindow

if TYPE_CHECKING:
    from neso.frontends.http2.connection import Http2Connection


class StreamEvents(Protocol):
    """What an application hears of a stream. None of these may raise."""

    def on_data(self, data: bytes) -> None:
        """A piece of the body. Call `Http2Stream.consumed` when it has been dealt with, so that more may come."""

    def on_end(self) -> None:
        """The body is complete."""

    def on_reset(self) -> None:
        """The client has given up, or is gone. Nothing can be sent any more."""


class Application(Protocol):
    """What answers requests."""

    def __call__(self, stream: Http2Stream, headers: Headers) -> StreamEvents: ...


class Http2Stream:
    """Sends what the application gives it as the client's windows allow. Made by the connection.

    `closed_here`: nothing can be sent any more. `closed_there`: nothing more comes.
    """

    __slots__ = (
        "_connection",
        "_end_block",
        "_expected",
        "_queue",
        "_sent",
        "_window",
        "closed_here",
        "closed_there",
        "events",
        "number",
        "send_window",
    )

    events: StreamEvents

    def __init__(self, connection: Http2Connection, number: int, length: int | None) -> None:
        self._connection = connection
        self.number = number
        self.send_window = connection.peer_settings.initial_window
        self.closed_here = False
        self.closed_there = False
        self._window = ReceiveWindow(connection.options.stream_window)
        self._expected = length  # bytes of the body that are still to come, if the client has said how many
        self._queue: deque[memoryview] | None = (
            None  # waits for windows, or for room in the transport's buffer
        )
        self._end_block: bytes | None = None  # the trailers, once they are known but data waits before them
        self._sent: asyncio.Future[None] | None = None

    @property
    def connection(self) -> Http2Connection:
        return self._connection

    # What the application calls.

    def send(self, head: bytes | None, data: bytes, trailers: bytes | None) -> None:
        """Send a header block, data, and the block that ends the stream; each may be left out (b"" for data)."""
        if self.closed_here or self._end_block is not None:
            return
        connection = self._connection
        connection.keepalive.sent_data()
        frames = b"" if head is None else connection.header_frames(self.number, head, 0)
        size = len(data)
        if not self._queue and connection.can_send(size) and size <= self.send_window:
            if size:
                self.send_window -= size
                connection.send_window -= size
                frames += frame_header(size, DATA, 0, self.number) + data
            if trailers is None:
                connection.output.write(frames)
            else:
                self._end(frames, trailers)
            return
        if not size and not self._queue and trailers is not None:
            self._end(frames, trailers)
            return
        if frames:
            connection.output.write(frames)
        if size:
            self._enqueue(data)
        self._end_block = trailers
        if self.send_window > 0:
            connection.send_later(self)

    async def drain(self) -> None:
        """Wait until all that was given is on its way. Raises `ConnectionResetError` when the client is gone."""
        if self._queue and not self.closed_here:
            if self._sent is None or self._sent.done():
                self._sent = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._sent)
        await self._connection.output.room()
        if self.closed_here:
            raise ConnectionResetError("the client has given up")

    def consumed(self, size: int) -> None:
        """So much of the body has been dealt with: let as much come."""
        if self.closed_there or self.closed_here:
            return
        increment = self._window.give_back(size)
        if increment:
            self._connection.keepalive.sent_data()
            self._connection.output.write(window_update(self.number, increment))

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once."""
        if not self.closed_here:
            self._connection.output.write(reset_frame(self.number, code))
            self.abandon()

    # What the connection calls.

    def take(self, size: int, body: int, last: bool) -> None:
        """A DATA frame of so many bytes came, so many of them the body's. Raises `StreamFault`."""
        if self.closed_there:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "data after the end")
        if not self._window.take(size):
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window")
        if self._expected is not None:
            self._expected -= body
            if self._expected < 0:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "more data than content-length")
        if last:
            self.end_there()
        elif size != body:
            self.consumed(size - body)

    def end_there(self) -> None:
        """The client sends nothing more. Raises `StreamFault` if it should have."""
        self.closed_there = True
        if self._expected:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "less data than content-length")

    def widen(self, increment: int) -> None:
        """The client takes so much more, or less if it is negative. Raises `StreamFault`."""
        self.send_window += increment
        if self.send_window > MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "window out of range")
        if self._queue and self.send_window > 0:
            self._connection.send_later(self)

    def send_some(self, most: int) -> bool:
        """Send of what waits as much as the windows allow, up to `most` bytes. Whether it can go on."""
        connection, queue = self._connection, self._queue
        while queue:
            first = queue[0]
            size = min(len(first), self.send_window, connection.send_window, connection.max_frame, most)
            if size <= 0:
                return self.send_window > 0
            if size == len(first):
                queue.popleft()
            else:
                queue[0] = first[size:]
            most -= size
            self.send_window -= size
            connection.send_window -= size
            connection.queued -= size
            connection.keepalive.sent_data()
            connection.output.write_large(frame_header(size, DATA, 0, self.number), first[:size])
        self._wake()
        if self._end_block is not None:
            self._end(b"", self._end_block)
        return False

    def abandon(self) -> None:
        """Send nothing more, and forget what waits."""
        self.closed_here = self.closed_there = True
        if self._queue:
            self._connection.queued -= sum(map(len, self._queue))
            self._queue = None
        self._end_block = None
        self._wake()
        self._connection.stream_ended(self)

    # The rest is the stream's own.

    def _enqueue(self, data: bytes) -> None:
        if self._queue is None:
            self._queue = deque()
        self._queue.append(memoryview(data))
        self._connection.queued += len(data)

    def _wake(self) -> None:
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)

    def _end(self, frames: bytes, trailers: bytes) -> None:
        """Send frames and the trailers. A client that still sends is told that it need not."""
        connection = self._connection
        frames += connection.header_frames(self.number, trailers, END_STREAM)
        if not self.closed_there:
            frames += reset_frame(self.number, ErrorCode.NO_ERROR)
        self.closed_here = True
        connection.output.write(frames)
        connection.stream_ended(self)
