"""One HTTP/2 stream: a request and its response."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol

from neso.frontends.transport.http2.flow_control import ReceiveWindow
from neso.frontends.transport.http2.frames import (
    DATA,
    END_STREAM,
    MAX_WINDOW,
    ErrorCode,
    Http2StreamError,
    frame_header,
    reset_frame,
    window_update,
)
from neso.frontends.transport.http2.headers import Headers
from neso.frontends.transport.memory import Reservation
from neso.frontends.transport.tcp import WriteProgress

if TYPE_CHECKING:
    from neso.frontends.transport.http2.connection import Http2Connection


logger = logging.getLogger(__name__)

_STALL_CHECK = 1.01
"""Interval of the checks for a client that does not read, as a multiple of the write timeout."""


class StreamEvents(Protocol):
    """Callbacks of an application for one stream. They must not raise."""

    def on_data(self, data: bytes) -> None:
        """A part of the body was received. Call `Http2Stream.consumed` once it is processed, to receive more."""

    def on_end(self) -> None:
        """The body is complete."""

    def on_reset(self) -> None:
        """The client reset the stream or disconnected. No more data can be sent."""


class _NoEvents:
    """Events of an ended stream. The stream must not refer to its call, which refers to the stream."""

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_reset(self) -> None: ...


NO_EVENTS = _NoEvents()


class Application(Protocol):
    """Handles requests: called with each new stream and its headers."""

    def __call__(self, stream: Http2Stream, headers: Headers) -> StreamEvents: ...


class Http2Stream:
    """Sends the application's data within the client's flow-control windows. Created by the connection.

    Received data counts as memory of the connection until the application calls `consumed`, or the stream ends.

    `local_closed`: the server's side is closed. `remote_closed`: the client's side is closed.
    """

    __slots__ = (
        "_drained",
        "_expected",
        "_held",
        "_progress",
        "_queue",
        "_queued",
        "_receive_window",
        "_remaining_length",
        "_reservation",
        "_stall_timer",
        "_trailers",
        "connection",
        "events",
        "local_closed",
        "number",
        "remote_closed",
        "send_window",
    )

    def __init__(self, connection: Http2Connection, number: int, length: int | None) -> None:
        self.connection = connection
        self.number = number
        self.events: StreamEvents = NO_EVENTS  # set by the connection until the stream ends
        self.send_window = connection.peer_settings.initial_window
        self.local_closed = False
        self.remote_closed = False
        self._receive_window = ReceiveWindow(connection.options.stream_window)
        self._held = 0  # bytes accounted for in the connection's memory
        self._expected = 0  # of these, reserved for data that has not arrived
        self._reservation: Reservation | None = None
        self._remaining_length = length  # bytes left of the request's Content-Length, None if absent
        self._queue: deque[memoryview] | None = (
            None  # data that does not fit the windows or the write buffer yet
        )
        self._queued = 0  # bytes in the queue
        self._progress: WriteProgress | None = None
        self._stall_timer: asyncio.TimerHandle | None = None  # runs while data is queued
        self._trailers: bytes | None = None  # sent after the queue
        self._drained: asyncio.Future[None] | None = None

    # Called by the application.

    def send(self, head: bytes | None, data: bytes, trailers: bytes | None) -> None:
        """Send a header block, data, and the trailer block that ends the stream; each is optional (b"": no data)."""
        if self.local_closed or self._trailers is not None:
            return
        connection = self.connection
        connection.keepalive.on_sent()
        frames = b"" if head is None else connection.header_frames(self.number, head, 0)
        size = len(data)
        if not self._queue and connection.can_send(size) and size <= self.send_window:
            if size:
                self.send_window -= size
                connection.send_window -= size
                frames += frame_header(size, DATA, 0, self.number) + data
            if trailers is None:
                connection.writer.write(frames)
            else:
                self._end(frames, trailers)
            return
        if not size and not self._queue and trailers is not None:
            self._end(frames, trailers)
            return
        if frames:
            connection.writer.write(frames)
        if size:
            self._enqueue(data)
        self._trailers = trailers
        if self.send_window > 0:
            connection.schedule(self)

    async def drain(self) -> None:
        """Wait until all data is written. Raises `ConnectionResetError` if the client reset the stream."""
        if self._queue and not self.local_closed:
            if self._drained is None or self._drained.done():
                self._drained = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._drained)
        await self.connection.writer.wait_writable()
        if self.local_closed:
            raise ConnectionResetError("the client reset the stream")

    def expect(self, size: int) -> None:
        """Let the client send `size` more bytes before any are consumed; it waits until the server has room for them.

        Raises `OverflowError` if the server never has.
        """
        missing = size - self._expected
        if missing <= 0 or self._reservation is not None or self.remote_closed:
            return
        if self._receive_window.allows(size):
            return

        def grant() -> None:
            self._reservation = None
            self._held += missing
            self._expected += missing
            increment = self._receive_window.extend(size)
            if increment:
                self.connection.writer.write(window_update(self.number, increment))

        self._reservation = self.connection.memory.reserve(missing, grant)
        if self._reservation is None:
            grant()

    def hold(self, size: int) -> bool:
        """Account for `size` bytes that the application created from the body. Returns False if there is no room."""
        if self.local_closed or not self.connection.memory.take(size):
            return False
        self._held += size
        return True

    def release(self, size: int) -> None:
        """Undo `hold`. The end of the stream does so too."""
        size = min(size, self._held)
        self._held -= size
        self.connection.memory.release(size)

    def consumed(self, size: int) -> None:
        """Return `size` bytes of processed body to the client's window."""
        self.release(size)
        if self.remote_closed or self.local_closed:
            return
        increment = self._receive_window.consume(size)
        if increment:
            self.connection.keepalive.on_sent()
            self.connection.writer.write(window_update(self.number, increment))

    def reset(self, code: ErrorCode) -> None:
        """Send RST_STREAM and close the stream."""
        if not self.local_closed:
            self.connection.writer.write(reset_frame(self.number, code))
            self.close()

    # Called by the connection.

    def abort(self, code: ErrorCode | None = None, *, by_client: bool = False) -> None:
        """End the stream before its response is complete, and tell the application. `code`: send RST_STREAM."""
        events = self.events
        if code is None:
            self.close(by_client)
        else:
            self.reset(code)
        events.on_reset()

    def receive_data(self, frame_size: int, data_size: int, end: bool) -> None:
        """Account for a DATA frame, which is larger than its data if padded. Raises `Http2StreamError`."""
        if self.remote_closed:
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "DATA after the end of the stream")
        if not self._receive_window.receive(frame_size):
            raise Http2StreamError(ErrorCode.FLOW_CONTROL_ERROR, "stream window exceeded")
        if self._remaining_length is not None:
            self._remaining_length -= data_size
            if self._remaining_length < 0:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "body longer than content-length")
        unexpected = frame_size
        if self._expected:
            expected = min(self._expected, frame_size)
            self._expected -= expected
            unexpected -= expected
        if not self.connection.memory.take(unexpected):
            raise Http2StreamError(ErrorCode.ENHANCE_YOUR_CALM, "the server holds too much request data")
        self._held += unexpected
        if end:
            self.close_remote()
        elif frame_size != data_size:
            self.consumed(frame_size - data_size)

    def close_remote(self) -> None:
        """Handle the end of the request body. Raises `Http2StreamError` if the body is too short."""
        self.remote_closed = True
        if self._reservation is not None or self._expected:
            self._drop_reservation()
        if self._remaining_length:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "body shorter than content-length")

    def increase_send_window(self, increment: int) -> None:
        """Change the send window; SETTINGS may decrease it. Raises `Http2StreamError`."""
        self.send_window += increment
        if self.send_window > MAX_WINDOW:
            raise Http2StreamError(ErrorCode.FLOW_CONTROL_ERROR, "window out of range")
        if self._queue and self.send_window > 0:
            self.connection.schedule(self)

    def send_queued(self, limit: int) -> bool:
        """Send queued data within the windows, at most `limit` bytes. Returns whether the stream can send more."""
        connection, queue = self.connection, self._queue
        while queue:
            first = queue[0]
            size = min(len(first), self.send_window, connection.send_window, connection.max_frame, limit)
            if size <= 0:
                return self.send_window > 0
            if size == len(first):
                queue.popleft()
            else:
                queue[0] = first[size:]
            limit -= size
            self.send_window -= size
            connection.send_window -= size
            connection.queued -= size
            self._queued -= size
            connection.keepalive.on_sent()
            connection.writer.write_large(frame_header(size, DATA, 0, self.number), first[:size])
        self._stop_stall_timer()
        self._wake_drain()
        if self._trailers is not None:
            self._end(b"", self._trailers)
        return False

    def close(self, by_client: bool = False) -> None:
        """Close both sides and drop queued data."""
        if not (self.remote_closed or by_client):
            self.connection.ignore(self.number)
        self.local_closed = self.remote_closed = True
        if self._queue:
            self.connection.queued -= self._queued
            self._queue = None
            self._queued = 0
        self._stop_stall_timer()
        self._trailers = None
        self.events = NO_EVENTS
        self._wake_drain()
        self._release_all()
        self.connection.remove_stream(self)

    # Internal.

    def _drop_reservation(self) -> None:
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None
        expected, self._expected = self._expected, 0
        self.release(expected)

    def _release_all(self) -> None:
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None
        held, self._held, self._expected = self._held, 0, 0
        if held:
            self.connection.memory.release(held)

    def _enqueue(self, data: bytes) -> None:
        if self._queue is None:
            self._queue = deque()
        self._queue.append(memoryview(data))
        self.connection.queued += len(data)
        self._queued += len(data)
        if self._stall_timer is None:
            self._start_stall_timer()
        elif self._progress is not None:
            self._progress.added(len(data))

    def _start_stall_timer(self) -> None:
        timeout = self.connection.options.write_timeout
        loop = asyncio.get_running_loop()
        self._progress = WriteProgress(timeout)
        self._progress.start(loop.time(), self._queued)
        self._stall_timer = loop.call_later(timeout * _STALL_CHECK, self._check_stall)

    def _check_stall(self) -> None:
        """Reset the stream if the client does not open its window for the queued data."""
        assert self._progress is not None
        loop = asyncio.get_running_loop()
        if self._progress.stalled(loop.time(), self._queued):
            logger.info("reset a stream of %s: it does not read its response", self.connection.peer)
            self._stall_timer = None
            self.abort(ErrorCode.CANCEL)
        else:
            timeout = self.connection.options.write_timeout
            self._stall_timer = loop.call_later(timeout * _STALL_CHECK, self._check_stall)

    def _stop_stall_timer(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = self._progress = None

    def _wake_drain(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _end(self, frames: bytes, trailers: bytes) -> None:
        """Send `frames` and the trailers. RST_STREAM tells a client that is still sending to stop."""
        connection = self.connection
        frames += connection.header_frames(self.number, trailers, END_STREAM)
        if not self.remote_closed:
            frames += reset_frame(self.number, ErrorCode.NO_ERROR)
            connection.ignore(self.number)
        self.local_closed = True
        self.events = NO_EVENTS
        connection.writer.write(frames)
        if self._held or self._reservation is not None:
            self._release_all()
        connection.completed += 1
        connection.remove_stream(self)
