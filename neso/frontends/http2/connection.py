"""One client's connection: frames in, streams out, everything of theirs ended when it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Callable

from neso.frontends.http2 import frames
from neso.frontends.http2.farewell import Farewell
from neso.frontends.http2.frame_reader import NotHttp2
from neso.frontends.http2.frames import DEFAULT_WINDOW, ConnectionFault, ErrorCode
from neso.frontends.http2.headers import Headers
from neso.frontends.http2.incoming import Incoming
from neso.frontends.http2.keepalive import Keepalive
from neso.frontends.http2.options import Http2Options
from neso.frontends.http2.output import Output
from neso.frontends.http2.peer_settings import PeerSettings
from neso.frontends.http2.stream import Application, Http2Stream

logger = logging.getLogger(__name__)

_HTTP1_ANSWER = (
    b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\nContent-Length: 35\r\n\r\n"
    b"This port speaks HTTP/2 only, gRPC\n"
)
_TURN = 64 << 10  # bytes that a stream may send before it is the next one's turn
_MOST_UNSENT = 16 << 20  # bytes of answers to a client that does not read
_LINGER = 1.0  # seconds; a socket that is closed while something comes loses what it has sent


class Shared:
    """What the connections of one server have in common. `on_empty` is called when the last of them is gone."""

    def __init__(self, application: Application, options: Http2Options) -> None:
        self.application = application
        self.options = options
        self.connections: set[Http2Connection] = set()
        self.draining = False
        self.on_empty: Callable[[], None] = lambda: None


class Http2Connection(asyncio.Protocol):
    """Parses what arrives, hands requests to the application, sends what its streams give it."""

    output: Output  # these three are made when there is a transport
    keepalive: Keepalive
    farewell: Farewell

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.options = shared.options
        self.streams: dict[int, Http2Stream] = {}
        self.peer_settings = PeerSettings()
        self.max_frame = self.peer_settings.max_frame
        self.send_window = DEFAULT_WINDOW
        self.queued = 0  # bytes that wait in streams
        # Those that wait, but not for their own window; the first is next.
        self._ready: OrderedDict[Http2Stream, None] = OrderedDict()
        self._incoming = Incoming(self)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self._refusing = False  # takes no more streams
        self._closed = False
        self._closing: list[asyncio.TimerHandle] = []

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        options = self.options
        self._transport.set_write_buffer_limits(high=options.write_buffer)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.output = Output(self._transport, options.write_timeout, self.abort)
        self.keepalive = Keepalive(self, options)
        self.farewell = Farewell(self.output, self._last_call)
        self._shared.connections.add(self)
        if self._shared.draining:
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        self.output.hold()
        try:
            for frame in self._incoming.frames(data):
                self._incoming.take(*frame)
                if self._closed:
                    return
        except NotHttp2 as other:
            self._turn_away(other)
        except ConnectionFault as fault:
            self._fail(fault.code, str(fault))
        except Exception:
            logger.exception("error in an HTTP/2 connection")
            self._fail(ErrorCode.INTERNAL_ERROR, "internal error")
        finally:
            self.output.release()
        self.keepalive.heard()
        if not self.output.writable and self.output.unsent > _MOST_UNSENT:
            self.abort()

    def eof_received(self) -> None:
        self._close()
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._stop_timers()
        for timer in self._closing:
            timer.cancel()
        self.output.end()
        self._end_streams()
        shared = self._shared
        shared.connections.discard(self)
        if not shared.connections:
            shared.on_empty()

    def pause_writing(self) -> None:
        self.output.pause()

    def resume_writing(self) -> None:
        self.output.resume()
        self._send_queued()

    # What the server calls.

    @property
    def peer(self) -> str:
        """The client's address, in gRPC's form."""
        name = self._transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            return "unknown"
        return f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"

    def go_away(self) -> None:
        """Ask the client to send no more requests; close when those that it has sent are answered."""
        if not self._incoming.greeted:
            self._close()
        elif not self._closed and not self._refusing:
            self.farewell.begin()

    def abort(self) -> None:
        """Close now, whatever is in flight."""
        self._closed = True
        self.output.close()
        self._transport.abort()

    # What streams call.

    def can_send(self, size: int) -> bool:
        """Whether so much data may go as one frame now."""
        return size <= self.send_window and size <= self.max_frame and self.output.writable

    def header_frames(self, number: int, block: bytes, flags: int) -> bytes:
        """The frames of a header block."""
        if self.peer_settings.table_update:
            block, self.peer_settings.table_update = self.peer_settings.table_update + block, b""
        return frames.header_frames(number, block, flags, self.max_frame)

    def send_later(self, stream: Http2Stream) -> None:
        """Let a stream send what waits in it when there is room; at once if there is."""
        self._ready[stream] = None
        self._send_queued()

    def stream_ended(self, stream: Http2Stream) -> None:
        """A stream that is closed on our side sends nothing more, and what comes for it is dropped."""
        self.streams.pop(stream.number, None)
        self._ready.pop(stream, None)
        if self._refusing and not self.streams:
            self._close()

    # What frames do.

    def begin_stream(self, number: int, complete: bool, headers: Headers, length: int | None) -> None:
        """A request begins; `complete`: it has no body. `length`: that of the body, if it is known."""
        options = self.options
        if self._refusing or len(self.streams) >= options.max_streams or self.queued > options.max_queued:
            self.output.write(frames.reset_frame(number, ErrorCode.REFUSED_STREAM))
            return
        stream = self.streams[number] = Http2Stream(self, number, length)
        stream.closed_there = complete
        stream.events = self._shared.application(stream, headers)
        if complete and not stream.closed_here:
            stream.events.on_end()

    def widen(self, increment: int) -> None:
        """The client takes so much more data."""
        self.send_window += increment
        self._send_queued()

    def leave(self) -> None:
        """The client opens no more streams; those that there are go on."""
        self._refusing = True
        if not self.streams:
            self._close()

    # The ends of the connection.

    def _fail(self, code: ErrorCode, message: str) -> None:
        """End the connection for what the client does."""
        logger.debug("HTTP/2 connection of %s ends: %s", self.peer, message)
        self.output.write(frames.goaway_frame(self._incoming.last_stream, code, message))
        self._close()

    def _turn_away(self, other: NotHttp2) -> None:
        if other.http1:
            self.output.write(_HTTP1_ANSWER)
        self._close()

    def _last_call(self) -> None:
        self.output.write(frames.goaway_frame(self._incoming.last_stream, ErrorCode.NO_ERROR))
        self.leave()

    def _close(self) -> None:
        """Send what has been written, then close when the client does, or has had time to."""
        if self._closed:
            return
        self._closed = True
        self._stop_timers()
        self._end_streams()
        self.output.close()
        loop = asyncio.get_running_loop()
        self._closing = [loop.call_later(self.options.write_timeout, self.abort)]
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._closing.append(loop.call_later(_LINGER, self._transport.close))
        else:
            self._transport.close()

    def _stop_timers(self) -> None:
        self.keepalive.stop()
        self.farewell.stop()

    def _end_streams(self) -> None:
        for stream in list(self.streams.values()):
            stream.abandon()
            stream.events.on_reset()

    def _send_queued(self) -> None:
        """Let the streams that wait send, in turns."""
        ready = self._ready
        while ready and self.send_window > 0 and self.output.writable and not self._closed:
            stream, _ = ready.popitem(last=False)
            if stream.send_some(_TURN) and not stream.closed_here:
                ready[stream] = None
