"""One client's connection: frames in, streams out, everything of theirs ended when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from neso.frontends.http2 import frames
from neso.frontends.http2.frames import (
    DATA,
    DEFAULT_MAX_FRAME,
    DEFAULT_WINDOW,
    HEADER_SIZE,
    HEADERS,
    MAX_WINDOW,
    PREFACE,
    ConnectionFault,
    ErrorCode,
)
from neso.frontends.http2.headers import HeaderDecoder, Headers
from neso.frontends.http2.keepalive import Keepalive
from neso.frontends.http2.options import Http2Options
from neso.frontends.http2.stream import Application, Http2Stream

logger = logging.getLogger(__name__)

_PING_ACK = frames.frame_header(8, frames.PING, frames.ACK, 0)
_SETTINGS_ACK = frames.frame_header(0, frames.SETTINGS, frames.ACK, 0)

# More streams that a client opens and resets at once than this, in flight or not, are an attack ("rapid reset").
_MOST_RESETS = 500


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

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.options = options = shared.options
        self.streams: dict[int, Http2Stream] = {}
        self.blocked: set[Http2Stream] = set()  # those that wait for a window
        self.send_window = DEFAULT_WINDOW
        self.max_frame = DEFAULT_MAX_FRAME
        self._initial_window = DEFAULT_WINDOW  # of the client, for new streams
        self._receive_window = options.connection_window
        self._unacknowledged = 0
        self._decoder = HeaderDecoder(options.max_header_list)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set by connection_made
        self._partial = b""
        self._greeted = False
        self._last_stream = 0
        self._resets = 0
        self._block: tuple[int, int, bytearray] | None = None  # stream, flags, header block that goes on
        self._going_away = False
        self._writable = asyncio.Event()
        self._writable.set()
        self.keepalive: Keepalive = None  # type: ignore[assignment]  # so is this

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        options = self.options
        self._transport.set_write_buffer_limits(high=options.write_buffer)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._shared.connections.add(self)
        self.keepalive = Keepalive(self, options)
        settings = {
            frames.MAX_CONCURRENT_STREAMS: MAX_WINDOW,
            frames.INITIAL_WINDOW_SIZE: options.stream_window,
            frames.MAX_FRAME_SIZE: options.max_frame,
            frames.MAX_HEADER_LIST_SIZE: options.max_header_list,
        }
        self.write(
            frames.settings_frame(settings)
            + frames.window_update(0, options.connection_window - DEFAULT_WINDOW)
        )

    def data_received(self, data: bytes) -> None:
        try:
            self._receive(data)
        except ConnectionFault as fault:
            self._fail(fault.code, str(fault))
        except Exception:
            logger.exception("error in an HTTP/2 connection")
            self._fail(ErrorCode.INTERNAL_ERROR, "internal error")

    def eof_received(self) -> None:
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self.keepalive.stop()
        for stream in list(self.streams.values()):
            stream.abandon()
            stream.events.on_reset()
        shared = self._shared
        shared.connections.discard(self)
        if not shared.connections:
            shared.on_empty()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # What streams and the server call.

    @property
    def peer(self) -> str:
        """The client's address, in gRPC's form."""
        name = self._transport.get_extra_info("peername")
        if not isinstance(name, tuple):
            return "unknown"
        return f"ipv6:[{name[0]}]:{name[1]}" if ":" in name[0] else f"ipv4:{name[0]}:{name[1]}"

    def write(self, data: bytes) -> None:
        """Send frames."""
        self._transport.write(data)

    def write_all(self, parts: list[bytes | memoryview]) -> None:
        """Send frames in several pieces without joining them."""
        self._transport.writelines(parts)

    async def drain(self) -> None:
        """Wait until the write buffer has room."""
        if not self._writable.is_set():
            await self._writable.wait()

    def stream_ended(self, stream: Http2Stream) -> None:
        """A stream that is closed on our side sends nothing more, and what comes for it is dropped."""
        self.streams.pop(stream.number, None)
        self.blocked.discard(stream)
        if self._going_away and not self.streams:
            self._transport.close()

    def go_away(self) -> None:
        """Take no more streams; close when those that there are have ended."""
        if self._going_away:
            return
        self._going_away = True
        self.write(frames.goaway_frame(self._last_stream, ErrorCode.NO_ERROR))
        if not self.streams:
            self._transport.close()

    def abort(self) -> None:
        """Close now, whatever is in flight."""
        self._transport.abort()

    def cut_off(self, code: ErrorCode, message: str) -> None:
        """End the connection for what the client does."""
        self._fail(code, message)

    # The rest is the connection's own.

    def _fail(self, code: ErrorCode, message: str) -> None:
        logger.debug("HTTP/2 connection of %s ends: %s", self.peer, message)
        with contextlib.suppress(RuntimeError):
            self.write(frames.goaway_frame(self._last_stream, code, message))
        self._going_away = True
        self._transport.close()

    def _receive(self, data: bytes) -> None:
        if self._partial:
            data = self._partial + data
        at, size = 0, len(data)
        if not self._greeted:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 connection preface")
            if size < len(PREFACE):
                self._partial = data
                return
            self._greeted = True
            at = len(PREFACE)
        max_frame = self.options.max_frame
        while size - at >= HEADER_SIZE:
            length = int.from_bytes(data[at : at + 3], "big")
            if length > max_frame:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes")
            end = at + HEADER_SIZE + length
            if end > size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big") & MAX_WINDOW
            self._frame(kind, flags, stream, data[at + HEADER_SIZE : end])
            at = end
        self._partial = data[at:] if at else data
        self.keepalive.heard()

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and kind != frames.CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        if kind == DATA:
            self._on_data(flags, number, payload)
        elif kind == HEADERS:
            payload = frames.strip_padding(payload, flags)
            self._on_headers(flags, number, payload[5:] if flags & frames.HAS_PRIORITY else payload)
        elif kind in _ON:
            _ON[kind](self, flags, number, payload)
        # PRIORITY means nothing any more, and unknown types are to be ignored.

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._receive_window -= size
        if self._receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        # What is buffered is bounded by the windows of the streams: the connection's only has to keep up.
        self._unacknowledged += size
        if self._unacknowledged * 2 >= self.options.connection_window:
            self._receive_window += self._unacknowledged
            self.write(frames.window_update(0, self._unacknowledged))
            self._unacknowledged = 0
        stream = self.streams.get(number)
        if stream is None:
            if number > self._last_stream or number == 0:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"DATA on idle stream {number}")
            return  # has ended here: the client may not know yet
        if stream.closed_there:
            raise ConnectionFault(ErrorCode.STREAM_CLOSED, f"DATA on closed stream {number}")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window")
        data = frames.strip_padding(payload, flags)
        if len(data) != size:
            stream.consumed(size - len(data))
        if flags & frames.END_STREAM:
            stream.closed_there = True
        if data:
            stream.events.on_data(data)
        if stream.closed_there:
            stream.events.on_end()

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if not flags & frames.END_HEADERS:
            self._block = (number, flags, bytearray(payload))
            return
        self._begin(number, flags, self._decoder.decode(payload))

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        if self._block is None or self._block[0] != number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block")
        _, first_flags, block = self._block
        block += payload
        if len(block) > self.options.max_header_list:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & frames.END_HEADERS:
            self._block = None
            self._begin(number, first_flags, self._decoder.decode(bytes(block)))

    def _begin(self, number: int, flags: int, headers: Headers) -> None:
        """A header block is complete: of a new stream, or the trailers of one."""
        stream = self.streams.get(number)
        if stream is not None:
            if stream.closed_there or not flags & frames.END_STREAM:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"second headers on stream {number}")
            stream.closed_there = True
            stream.events.on_end()
            return
        if number <= self._last_stream:
            return  # trailers of a stream that has ended here
        if number % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"client opens stream {number}")
        self._last_stream = number
        if self._going_away or self._shared.draining:
            self.write(frames.reset_frame(number, ErrorCode.REFUSED_STREAM))
            return
        stream = Http2Stream(self, number, self._initial_window, self.options.stream_window)
        self.streams[number] = stream
        stream.closed_there = bool(flags & frames.END_STREAM)
        stream.events = self._shared.application(stream, headers)
        if stream.closed_there and not stream.closed_here:
            stream.events.on_end()

    def _on_reset(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a broken length")
        if number == 0 or number > self._last_stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"RST_STREAM on idle stream {number}")
        stream = self.streams.get(number)
        if stream is None:
            return
        self._resets += 1
        if self._resets > _MOST_RESETS + self._last_stream // 4:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too many streams are reset")
        stream.closed_there = True
        stream.abandon()
        stream.events.on_reset()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            return
        for name, value in frames.parse_settings(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "initial window too large")
                for stream in self.streams.values():
                    stream.send_window += value - self._initial_window
                self._initial_window = value
            elif name == frames.MAX_FRAME_SIZE:
                if not DEFAULT_MAX_FRAME <= value < 1 << 24:
                    raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame size out of range")
                self.max_frame = min(value, 1 << 20)
        self.write(_SETTINGS_ACK)
        self._flush()

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING of a broken length")
        if flags & frames.ACK:
            return
        self.keepalive.pinged()
        self.write(_PING_ACK + payload)

    def _on_goaway(self, flags: int, number: int, payload: bytes) -> None:
        """The client opens no more streams; those that there are go on."""
        self._going_away = True
        if not self.streams:
            self._transport.close()

    def _on_window_update(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a broken length")
        increment = int.from_bytes(payload, "big") & MAX_WINDOW
        if number == 0:
            self.send_window += increment
            if increment == 0 or self.send_window > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window out of range")
            self._flush()
            return
        stream = self.streams.get(number)
        if stream is None:
            return
        stream.send_window += increment
        if increment == 0 or stream.send_window > MAX_WINDOW:
            stream.reset(ErrorCode.FLOW_CONTROL_ERROR)
            stream.events.on_reset()
        elif stream in self.blocked:
            stream.flush()

    def _on_push_promise(self, flags: int, number: int, payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client pushes")

    def _flush(self) -> None:
        for stream in list(self.blocked):
            stream.flush()


_ON = {
    frames.RST_STREAM: Http2Connection._on_reset,
    frames.SETTINGS: Http2Connection._on_settings,
    frames.PUSH_PROMISE: Http2Connection._on_push_promise,
    frames.PING: Http2Connection._on_ping,
    frames.GOAWAY: Http2Connection._on_goaway,
    frames.WINDOW_UPDATE: Http2Connection._on_window_update,
    frames.CONTINUATION: Http2Connection._on_continuation,
}
