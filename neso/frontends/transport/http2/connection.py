"""One HTTP/2 connection: its transport, streams and shutdown."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

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
from neso.frontends.transport.tcp import enable_tcp_keepalive, peer_address

logger = logging.getLogger(__name__)

_HTTP1_RESPONSE = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 35\r\n\r\n"
    b"This port speaks HTTP/2 only, gRPC\n"
)
_MAX_BYTES_PER_TURN = 64 << 10  # bytes that one stream sends before the next stream
_MAX_UNSENT = 16 << 20  # bytes of control frames that are buffered for a client that does not read
_LINGER = 1.0  # seconds; closing a socket with unread data discards sent data


class ServerContext:
    """State shared by the connections of one server. `on_empty` is called when the last connection is lost."""

    def __init__(self, application: Application, options: Http2Options) -> None:
        self.application = application
        self.options = options
        self.connections: set[Http2Connection] = set()
        self.draining = False
        self.on_empty: Callable[[], None] = lambda: None


class Http2Connection(asyncio.Protocol):
    """Parses frames, passes requests to the application and sends the data of its streams."""

    # Set in `connection_made`.
    writer: FrameWriter
    keepalive: Keepalive
    graceful_goaway: GracefulGoAway

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self.options = context.options
        self.streams: dict[int, Http2Stream] = {}
        self.peer_settings = PeerSettings()
        self.max_frame = self.peer_settings.max_frame
        self.send_window = DEFAULT_WINDOW
        self.queued = 0  # bytes queued in all streams
        # Streams with queued data and an open stream window, in round-robin order.
        self._ready: OrderedDict[Http2Stream, None] = OrderedDict()
        self._handler = FrameHandler(self)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self._refuse_streams = False
        self._closed = False
        self._close_timers: list[asyncio.TimerHandle] = []
        self.address = ""
        """IP address of the client, "" for a Unix socket."""

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        options = self.options
        self._transport.set_write_buffer_limits(high=options.write_buffer)
        enable_tcp_keepalive(transport)
        self.address = peer_address(transport)
        self.writer = FrameWriter(self._transport, options.write_timeout, self.abort)
        self.keepalive = Keepalive(self, options)
        self.graceful_goaway = GracefulGoAway(self.writer, self._send_final_goaway)
        self._context.connections.add(self)
        if self._context.draining:
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self.writer.cork()
        try:
            for frame in self._handler.parse(data):
                self._handler.handle(*frame)
                if self._closed:
                    return
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
        self.writer.release()
        del self._handler, self.keepalive, self.graceful_goaway  # they refer to this connection
        context = self._context
        context.connections.discard(self)
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
        if (
            self._refuse_streams
            or len(self.streams) >= options.max_streams
            or self.queued > options.max_queued
        ):
            self.writer.write(frames.reset_frame(number, ErrorCode.REFUSED_STREAM))
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
