"""One stream: a request and its response."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from neso.frontends.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    ErrorCode,
    frame_header,
    reset_frame,
    window_update,
)
from neso.frontends.http2.headers import Headers

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
    """Sends what the application gives it as the client's windows allow. Made by the connection."""

    __slots__ = (
        "_connection",
        "_end_block",
        "_queue",
        "_queued",
        "_sent",
        "_unacknowledged",
        "closed_here",
        "closed_there",
        "events",
        "number",
        "receive_window",
        "send_window",
    )

    events: StreamEvents

    def __init__(
        self, connection: Http2Connection, number: int, send_window: int, receive_window: int
    ) -> None:
        self._connection = connection
        self.number = number
        self.send_window = send_window
        self.receive_window = receive_window
        self.closed_here = False
        self.closed_there = False
        self._unacknowledged = 0  # bytes dealt with that the client has not been told of
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._end_block: bytes | None = None  # the trailers, once they are known but data waits before them
        self._sent: asyncio.Future[None] | None = None

    @property
    def connection(self) -> Http2Connection:
        return self._connection

    def send(self, head: bytes | None, data: bytes, trailers: bytes | None) -> None:
        """Send a header block, data, and the block that ends the stream; each may be left out (b"" for data)."""
        if self.closed_here:
            return
        self._connection.keepalive.sent_data()
        frames = b""
        if head is not None:
            frames = frame_header(len(head), HEADERS, END_HEADERS, self.number) + head
        connection = self._connection
        size = len(data)
        plain = not self._queue and size <= connection.max_frame
        if plain and size <= self.send_window and size <= connection.send_window:
            if size:
                self.send_window -= size
                connection.send_window -= size
                frames += frame_header(size, DATA, 0, self.number) + data
            if trailers is None:
                connection.write(frames)
            else:
                self._end(frames, trailers)
            return
        if frames:
            connection.write(frames)
        if size:
            self._queue.append(memoryview(data))
            self._queued += size
        self._end_block = trailers
        self.flush()

    def flush(self) -> None:
        """Send of what waits as much as the windows allow."""
        connection = self._connection
        queue = self._queue
        while queue:
            size = min(len(queue[0]), self.send_window, connection.send_window, connection.max_frame)
            if size <= 0:
                connection.blocked.add(self)
                return
            piece = queue[0][:size]
            if size == len(queue[0]):
                queue.popleft()
            else:
                queue[0] = queue[0][size:]
            self.send_window -= size
            connection.send_window -= size
            self._queued -= size
            connection.write_all([frame_header(size, DATA, 0, self.number), piece])
        connection.blocked.discard(self)
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)
        if self._end_block is not None:
            block, self._end_block = self._end_block, None
            self._end(b"", block)

    async def drain(self) -> None:
        """Wait until all that was given is on its way. Raises `ConnectionResetError` when the client is gone."""
        if self._queue and not self.closed_here:
            if self._sent is None or self._sent.done():
                self._sent = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._sent)
        await self._connection.drain()
        if self.closed_here:
            raise ConnectionResetError("the client has given up")

    def consumed(self, size: int) -> None:
        """So much of the body has been dealt with: let as much come."""
        if self.closed_there or self.closed_here:
            return
        self._unacknowledged += size
        if self._unacknowledged * 2 >= self._connection.options.stream_window:
            self.receive_window += self._unacknowledged
            self._connection.write(window_update(self.number, self._unacknowledged))
            self._unacknowledged = 0

    def reset(self, code: ErrorCode) -> None:
        """End the stream at once."""
        if not self.closed_here:
            self._connection.write(reset_frame(self.number, code))
            self.closed_there = True
            self.abandon()

    def abandon(self) -> None:
        """Send nothing more, and forget what waits."""
        self.closed_here = True
        self._queue.clear()
        self._end_block = None
        if self._sent is not None and not self._sent.done():
            self._sent.set_result(None)
        self._connection.stream_ended(self)

    def _end(self, frames: bytes, trailers: bytes) -> None:
        """Send frames and the trailers. A client that still sends is told that it need not."""
        frames += frame_header(len(trailers), HEADERS, END_HEADERS | END_STREAM, self.number) + trailers
        if not self.closed_there:
            frames += reset_frame(self.number, ErrorCode.NO_ERROR)
        self.closed_here = True
        self._connection.write(frames)
        self._connection.stream_ended(self)
