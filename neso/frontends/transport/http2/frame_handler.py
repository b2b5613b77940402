"""Handling of received frames (RFC 9113, sections 5 and 6)."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from neso.frontends.transport.http2 import frames
from neso.frontends.transport.http2.flow_control import ReceiveWindow, TokenBucket
from neso.frontends.transport.http2.frames import (
    DEFAULT_WINDOW,
    END_STREAM,
    MAX_WINDOW,
    ErrorCode,
    FrameReader,
    Http2ConnectionError,
    Http2StreamError,
)
from neso.frontends.transport.http2.headers import (
    HeaderBlockReader,
    HeaderDecoder,
    trailers_error,
)

if TYPE_CHECKING:
    from neso.frontends.transport.http2.connection import Http2Connection

logger = logging.getLogger(__name__)

_MAX_IGNORED = 1000  # streams closed by the server whose frames may still arrive
_STREAMS_PER_TOKEN = 16  # SETTINGS change the window of each open stream
_SETTING_SIZE = 6  # bytes


class FrameHandler:
    """Parses the bytes of one connection into frames, validates them and applies them to the connection.

    `parse` yields frames and raises `PrefaceError` and `Http2ConnectionError`. `settings_received`: the client's
    handshake is complete. `last_stream`: highest stream id that the client has used.
    """

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        options = connection.options
        self.parse = FrameReader(options.max_frame).feed
        self._blocks = HeaderBlockReader(options.max_header_list)
        self._decoder = HeaderDecoder(options.max_header_list)
        self._window = ReceiveWindow(options.connection_window)
        # Clients cancel calls, so completed streams return a token; opening and resetting streams forever is an attack.
        self._resets = TokenBucket("stream resets", options.reset_burst, options.reset_rate)
        self._useless_frames = TokenBucket(
            "frames without effect", options.useless_burst, options.useless_rate
        )
        self._ignored: OrderedDict[int, None] = OrderedDict()
        self.settings_received = False
        self.last_stream = 0

    def count_reset(self) -> None:
        """Charge a reset to the connection. Raises `Http2ConnectionError`."""
        connection = self._connection
        if connection.completed:
            self._resets.add(connection.completed)
            connection.completed = 0
        self._resets.consume()

    def ignore(self, number: int) -> None:
        """Ignore the frames that the client sends before it knows that the server has closed a stream."""
        self._ignored[number] = None
        if len(self._ignored) > _MAX_IGNORED:
            self._ignored.popitem(last=False)

    def handle(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Process a frame, given by its type, flags, stream id and payload. Raises `Http2ConnectionError`."""
        if not self.settings_received:
            self._complete_handshake(kind, flags)
        if self._blocks.open is not None and kind != frames.CONTINUATION:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "expected CONTINUATION")
        handler = _HANDLERS.get(kind)
        if handler is None:
            self._useless_frames.consume()  # frames of unknown types are ignored
            return
        try:
            handler(self, flags, number, payload)
        except Http2StreamError as error:
            self._reset_stream(number, error)

    def _complete_handshake(self, kind: int, flags: int) -> None:
        """Check that the first frame is SETTINGS, then send the server's, which HTTP/1 clients must not receive."""
        if kind != frames.SETTINGS or flags & frames.ACK:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self.settings_received = True
        connection, options = self._connection, self._connection.options
        settings = {
            frames.MAX_CONCURRENT_STREAMS: options.max_streams,
            frames.INITIAL_WINDOW_SIZE: options.stream_window,
            frames.MAX_FRAME_SIZE: options.max_frame,
            frames.MAX_HEADER_LIST_SIZE: options.max_header_list,
        }
        connection.writer.write(frames.settings_frame(settings))
        if options.connection_window > DEFAULT_WINDOW:
            connection.writer.write(frames.window_update(0, options.connection_window - DEFAULT_WINDOW))
        connection.keepalive.on_handshake()

    def _reset_stream(self, number: int, error: Http2StreamError) -> None:
        logger.debug("HTTP/2 stream %d of %s ends: %s", number, self._connection.peer, error)
        self.count_reset()  # as costly as a reset by the client
        stream = self._connection.streams.get(number)
        if stream is None:
            self.ignore(number)
            self._connection.writer.write(frames.reset_frame(number, error.code))
        else:
            stream.abort(error.code)

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        if not self._window.receive(size):
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "connection window exceeded")
        # The stream windows bound the buffered data, so the connection's credit is returned at once.
        increment = self._window.consume(size)
        if increment:
            self._connection.writer.write(frames.window_update(0, increment))
        data = frames.strip_padding(payload, flags) if flags & frames.PADDED else payload
        if not data and not flags & END_STREAM:
            self._useless_frames.consume()
        stream = self._connection.streams.get(number)
        if stream is None:
            self._check_not_idle(number)
            if number not in self._ignored:
                raise Http2StreamError(ErrorCode.STREAM_CLOSED, "DATA on a closed stream")
            return
        stream.receive_data(size, len(data), bool(flags & END_STREAM))
        if data:
            stream.events.on_data(data)
        if stream.remote_closed and not stream.local_closed:
            stream.events.on_end()

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        block = self._blocks.on_headers(flags, number, payload)
        if block is not None:
            self._on_header_block(flags, number, block)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        self._useless_frames.consume()
        complete = self._blocks.on_continuation(flags, number, payload)
        if complete is not None:
            headers_flags, block = complete
            self._on_header_block(headers_flags, number, block)

    def _on_header_block(self, flags: int, number: int, block: bytes) -> None:
        """Open a new stream, or end an open stream with trailers. `flags`: of the HEADERS frame."""
        if number % 2 == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"client opens stream {number}")
        headers = self._decoder.decode(block)
        if number > self.last_stream:
            self.last_stream = number
            length = headers.validate_request()
            end = bool(flags & END_STREAM)
            if end and length:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "body shorter than content-length")
            if self._blocks.depends_on == number:
                raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "the stream depends on itself")
            self._connection.open_stream(number, end, headers, length)
            return
        stream = self._connection.streams.get(number)
        if stream is None:
            self._useless_frames.consume()
            if number not in self._ignored or (headers and headers[0][0].startswith(b":")):
                raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, f"HEADERS on the closed stream {number}")
            return
        error = trailers_error(headers)
        if stream.remote_closed:
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "HEADERS after the end of the stream")
        if not flags & END_STREAM or error is not None:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, error or "trailers without END_STREAM")
        stream.close_remote()
        stream.events.on_end()

    def _on_priority(self, flags: int, number: int, payload: bytes) -> None:
        """Validate and ignore: RFC 9113 deprecates PRIORITY."""
        self._useless_frames.consume()
        if number == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != 5:
            raise Http2StreamError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY with an invalid length")
        if int.from_bytes(payload[:4], "big") & MAX_WINDOW == number:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "the stream depends on itself")

    def _on_reset(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM with an invalid length")
        self._check_not_idle(number)
        self.count_reset()
        stream = self._connection.streams.get(number)
        if stream is not None:
            stream.abort(by_client=True)

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        self._check_connection_frame(number, "SETTINGS")
        if flags & frames.ACK:
            if payload:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with an invalid length")
            self._useless_frames.consume()
            return
        connection = self._connection
        entries = len(payload) // _SETTING_SIZE
        self._useless_frames.consume(1 + (entries + len(connection.streams)) / _STREAMS_PER_TOKEN)
        growth = connection.peer_settings.update(payload)
        connection.max_frame = connection.peer_settings.max_frame
        connection.writer.write(frames.SETTINGS_ACK)
        if growth:
            try:
                for stream in list(connection.streams.values()):
                    stream.increase_send_window(growth)
            except Http2StreamError as error:
                raise Http2ConnectionError(error.code, str(error)) from None

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        self._check_connection_frame(number, "PING")
        if len(payload) != 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "PING with an invalid length")
        self._useless_frames.consume()
        if flags & frames.ACK:
            self._connection.graceful_goaway.on_ping_ack(payload)
            return
        self._connection.keepalive.on_ping()
        self._connection.writer.write(frames.ping_frame(payload, frames.ACK))

    def _on_goaway(self, flags: int, number: int, payload: bytes) -> None:
        self._check_connection_frame(number, "GOAWAY")
        if len(payload) < 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY with an invalid length")
        self._connection.refuse_new_streams()

    def _on_window_update(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE with an invalid length")
        increment = int.from_bytes(payload, "big") & MAX_WINDOW
        if number == 0:
            if increment == 0:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE with increment 0")
            if self._connection.send_window + increment > MAX_WINDOW:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "window out of range")
            self._connection.increase_send_window(increment)
            return
        stream = self._connection.streams.get(number)
        if stream is None:
            self._check_not_idle(number)
            return
        if increment == 0:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE with increment 0")
        stream.increase_send_window(increment)

    def _on_push_promise(self, flags: int, number: int, payload: bytes) -> None:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _check_not_idle(self, number: int) -> None:
        if number == 0 or number > self.last_stream or number % 2 == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"stream {number} is idle")

    def _check_connection_frame(self, number: int, name: str) -> None:
        if number:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"{name} on a stream")


_HANDLERS = {
    frames.DATA: FrameHandler._on_data,
    frames.HEADERS: FrameHandler._on_headers,
    frames.PRIORITY: FrameHandler._on_priority,
    frames.RST_STREAM: FrameHandler._on_reset,
    frames.SETTINGS: FrameHandler._on_settings,
    frames.PUSH_PROMISE: FrameHandler._on_push_promise,
    frames.PING: FrameHandler._on_ping,
    frames.GOAWAY: FrameHandler._on_goaway,
    frames.WINDOW_UPDATE: FrameHandler._on_window_update,
    frames.CONTINUATION: FrameHandler._on_continuation,
}
