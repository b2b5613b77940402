"""One HTTP/2 connection: its transport, streams and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator

from neso.frontends.transport.http2 import frames
from neso.frontends.transport.http2.flow_control import FrameWriter
from neso.frontends.transport.http2.frame_handler import FrameHandler
from neso.frontends.transport.http2.frames import (
    DEFAULT_WINDOW,
    ErrorCode,
    Http2ConnectionError,
    PrefaceError,
)
from neso.frontends.transport.http2.headers import Headers
from neso.frontends.transport.http2.lifetime import GracefulGoAway, Keepalive
from neso.frontends.transport.http2.settings import Http2Options, PeerSettings
from neso.frontends.transport.http2.stream import Application, Http2Stream
from neso.frontends.transport.memory import MemoryAccount
from neso.frontends.transport.tcp import (
    LARGE_READ,
    Admission,
    ConnectionLimits,
    Turn,
    enable_tcp_keepalive,
)

logger = logging.getLogger(__name__)

_HTTP1_RESPONSE = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 35\r\n\r\n"
    b"This port speaks HTTP/2 only, gRPC\n"
)
_MAX_BYTES_PER_TURN = 64 << 10  # bytes that one stream sends before the next stream
_COSTLY = 512  # bytes of a frame after which the time of a turn is checked; for smaller ones, every eighth
_MAX_UNSENT = 16 << 20  # bytes of control frames that are buffered for a client that does not read
_LINGER = 1.0  # seconds; closing a socket with unread data discards sent data

ReceivedFrames = Iterator[tuple[int, int, int, bytes]]
"""Type, flags, stream id and payload of frames."""


class ServerContext:
    """State shared by the connections of one server. `on_empty` is called when the last connection is lost."""

    def __init__(
        self, application: Application, options: Http2Options, limits: ConnectionLimits | None = None
    ) -> None:
        self.application = application
        self.options = options
        self.limits = limits or ConnectionLimits()
        self.memory = MemoryAccount(options.max_server_memory)
        self.connections: set[Http2Connection] = set()
        self.draining = False
        self._turn: Turn | None = None  # created by the first connection: the loop runs then
        self.on_empty: Callable[[], None] = lambda: None

    @property
    def turn(self) -> Turn:
        """The turn that the connections share."""
        if self._turn is None:
            self._turn = Turn(asyncio.get_running_loop(), self.options.turn)
        return self._turn


class Http2Connection(asyncio.Protocol):
    """Parses frames, passes requests to the application and sends the data of its streams."""

    # Set in `connection_made`.
    writer: FrameWriter
    keepalive: Keepalive
    graceful_goaway: GracefulGoAway
    _loop: asyncio.AbstractEventLoop
    _turn: Turn

    def __init__(self, context: ServerContext, admission: Admission | None = None) -> None:
        self._context = context
        self.options = context.options
        self.memory = MemoryAccount(self.options.max_connection_memory, context.memory)
        self.streams: dict[int, Http2Stream] = {}
        self.peer_settings = PeerSettings()
        self.max_frame = self.peer_settings.max_frame
        self.send_window = DEFAULT_WINDOW
        self.queued = 0  # bytes queued in all streams
        self.completed = 0  # responses since the last reset
        # Streams with queued data and an open stream window, in round-robin order.
        self._ready: OrderedDict[Http2Stream, None] = OrderedDict()
        self._handler = FrameHandler(self)
        self.ignore = self._handler.ignore
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self._admission = admission  # None before `connection_made`, unless the connection uses TLS
        self._refuse_streams = False
        self._closed = False
        # Frames that did not fit in one turn of the event loop. Reading is paused while there are any.
        self._unhandled: ReceivedFrames | None = None
        self._received: list[bytes] = []  # bytes that arrived before reading was paused
        self._reading_paused = False
        self._close_timers: list[asyncio.TimerHandle] = []
        self.address = ""
        """See `client_network`."""

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._loop = asyncio.get_running_loop()
        self._turn = self._context.turn
        options = self.options
        self._transport.set_write_buffer_limits(high=options.write_buffer)
        enable_tcp_keepalive(transport)
        self.writer = FrameWriter(self._transport, options.write_timeout, self.abort)
        self.keepalive = Keepalive(self, options)
        self.graceful_goaway = GracefulGoAway(self.writer, self._send_final_goaway)
        if self._admission is None:
            self._admission = self._context.limits.admit(transport)
        if self._admission is None:
            logger.debug("too many connections: closing that of %s", self.peer)
            self.abort()
            return
        self.address = self._admission.address
        self._context.connections.add(self)
        if self._context.draining:
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._unhandled is not None:
            self._received.append(data)
            return
        if not self._closed:
            self._handle_frames(self._handler.parse(data))
        # Reading takes time, also that of data which a closed connection drops.
        if len(data) >= LARGE_READ and self._unhandled is None and self._turn.is_over():
            self._continue_later(iter(()))

    def _handle_frames(self, received: ReceivedFrames) -> None:
        """Handle frames for one turn of the event loop; the rest is handled in the next turns."""
        self.writer.cork()
        handle = self._handler.handle
        turn = self._turn
        count = 0
        try:
            for frame in received:
                handle(*frame)
                if self._closed:
                    return
                count += 1
                if (not count & 7 or len(frame[3]) > _COSTLY) and turn.is_over():
                    self._continue_later(received)
                    break
        except PrefaceError as error:
            if error.http1:
                self.writer.write(_HTTP1_RESPONSE)
            self._close()
        except Http2ConnectionError as error:
            self._fail(error.code, str(error))
        except Exception:
            logger.exception("error in an HTTP/2 connection")
            self._fail(ErrorCode.INTERNAL_ERROR, "internal error")
        finally:
            self.writer.uncork()
        self.keepalive.on_received()
        if not self.writer.writable and self.writer.unsent > _MAX_UNSENT:
            self.abort()

    def _continue_later(self, rest: ReceivedFrames) -> None:
        if not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
        self._unhandled = rest
        self._loop.call_soon(self._continue)

    def _continue(self) -> None:
        rest, self._unhandled = self._unhandled, None
        if rest is not None and not self._closed:
            self._handle_frames(rest)
        while self._unhandled is None and self._received and not self._closed:
            self._handle_frames(self._handler.parse(self._received.pop(0)))
        if self._unhandled is None and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    def eof_received(self) -> None:
        self._close()
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._stop_timers()
        for timer in self._close_timers:
            timer.cancel()
        self.writer.wake_waiters()
        self._reset_streams()
        self.memory.close()
        self.writer.release()
        del self._handler, self.ignore, self.keepalive, self.graceful_goaway  # they refer to this connection
        context = self._context
        context.connections.discard(self)
        if self._admission is not None:
            self._admission.release()
        if not context.connections:
            context.on_empty()

    def pause_writing(self) -> None:
        self.writer.pause()

    def resume_writing(self) -> None:
        self.writer.resume()
        self._send_ready_streams()

    # Called by the server.

    @property
    def peer(self) -> str:
        """The client's address as a gRPC URI, such as `ipv4:127.0.0.1:1234`."""
        name = self._transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            return "unknown"
        return f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"

    def go_away(self) -> None:
        """Shut down gracefully: close after the responses to all requests that the client has sent."""
        if not self._handler.settings_received:
            self._close()
        elif not self._closed and not self._refuse_streams:
            self.graceful_goaway.start()

    def abort(self) -> None:
        """Close immediately."""
        self._closed = True
        self.writer.close()
        self._transport.abort()

    # Called by streams.

    def can_send(self, size: int) -> bool:
        """Whether one DATA frame with `size` bytes can be sent now, apart from the stream's window."""
        return size <= self.send_window and size <= self.max_frame and self.writer.writable

    def header_frames(self, number: int, block: bytes, flags: int) -> bytes:
        """Return the frames of a header block on stream `number`."""
        settings = self.peer_settings
        if settings.table_update:
            block, settings.table_update = settings.table_update + block, b""
        size = len(block)
        if size > self.max_frame:
            return frames.header_frames(number, block, flags, self.max_frame)
        return frames.frame_header(size, frames.HEADERS, flags | frames.END_HEADERS, number) + block

    def schedule(self, stream: Http2Stream) -> None:
        """Send the queued data of a stream as soon as the connection allows."""
        self._ready[stream] = None
        self._send_ready_streams()

    def remove_stream(self, stream: Http2Stream) -> None:
        """Remove a stream whose local side is closed. Frames received for it later are dropped."""
        self.streams.pop(stream.number, None)
        self._ready.pop(stream, None)
        if self._refuse_streams and not self.streams:
            self._close()

    # Called by the frame handler.

    def open_stream(self, number: int, end: bool, headers: Headers, length: int | None) -> None:
        """Start a request. `end`: the request has no body. `length`: its Content-Length."""
        options = self.options
        excess = len(self.streams) >= options.max_streams
        if self._refuse_streams or excess or self.queued > options.max_queued:
            if excess:  # the client ignores MAX_CONCURRENT_STREAMS
                self._handler.count_reset()
            self.writer.write(frames.reset_frame(number, ErrorCode.REFUSED_STREAM))
            self.ignore(number)
            return
        stream = self.streams[number] = Http2Stream(self, number, length)
        stream.remote_closed = end
        events = self._context.application(stream, headers)
        if not stream.local_closed:
            stream.events = events
            if end:
                events.on_end()

    def increase_send_window(self, increment: int) -> None:
        """Handle a WINDOW_UPDATE for the connection."""
        self.send_window += increment
        self._send_ready_streams()

    def refuse_new_streams(self) -> None:
        """Refuse new streams; close when all open streams have ended."""
        self._refuse_streams = True
        if not self.streams:
            self._close()

    # Closing.

    def _fail(self, code: ErrorCode, message: str) -> None:
        """Close because of a connection error."""
        logger.debug("HTTP/2 connection of %s ends: %s", self.peer, message)
        self.writer.write(frames.goaway_frame(self._handler.last_stream, code, message))
        self._close()

    def _send_final_goaway(self) -> None:
        self.writer.write(frames.goaway_frame(self._handler.last_stream, ErrorCode.NO_ERROR))
        self.refuse_new_streams()

    def _close(self) -> None:
        """Flush the write buffer, then close when the client closes or `_LINGER` seconds have passed."""
        if self._closed:
            return
        self._closed = True
        self._stop_timers()
        self._reset_streams()
        self.writer.close()
        loop = asyncio.get_running_loop()
        self._close_timers = [loop.call_later(self.options.write_timeout, self.abort)]
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._close_timers.append(loop.call_later(_LINGER, self._transport.close))
        else:
            self._transport.close()

    def _stop_timers(self) -> None:
        self.keepalive.stop()
        self.graceful_goaway.stop()

    def _reset_streams(self) -> None:
        for stream in list(self.streams.values()):
            stream.abort()

    def _send_ready_streams(self) -> None:
        """Send queued data, round-robin over the streams."""
        ready = self._ready
        while ready and self.send_window > 0 and self.writer.writable and not self._closed:
            stream, _ = ready.popitem(last=False)
            if stream.send_queued(_MAX_BYTES_PER_TURN) and not stream.local_closed:
                ready[stream] = None
