"""What a client's frames do to its connection (RFC 9113, sections 5 and 6)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from neso.frontends.http2 import frames
from neso.frontends.http2.budget import Budget
from neso.frontends.http2.frame_reader import FrameReader
from neso.frontends.http2.frames import (
    DEFAULT_WINDOW,
    END_STREAM,
    MAX_WINDOW,
    ConnectionFault,
    ErrorCode,
    StreamFault,
)
from neso.frontends.http2.header_block import HeaderBlock, HeaderBlockReader
from neso.frontends.http2.headers import HeaderDecoder
from neso.frontends.http2.receive_window import ReceiveWindow
from neso.frontends.http2.request_headers import trailers_fault

if TYPE_CHECKING:
    from neso.frontends.http2.connection import Http2Connection

logger = logging.getLogger(__name__)


class Incoming:
    """The client's side of a connection."""

    def __init__(self, connection: Http2Connection) -> None:
        self._connection = connection
        options = connection.options
        self._reader = FrameReader(options.max_frame)
        self._blocks = HeaderBlockReader(options.max_header_list)
        self._decoder = HeaderDecoder(options.max_header_list)
        self._window = ReceiveWindow(options.connection_window)
        # Clients that cancel are many, and cancelling is cheap; to open and to cancel for ever is an attack.
        self._resets = Budget("resets of streams", 10_000, 200)
        self._idle_talk = Budget("frames of no use", 1000, 100)
        self._has_settings = False
        self.last_stream = 0

    @property
    def greeted(self) -> bool:
        """Whether the client speaks HTTP/2."""
        return self._has_settings

    def frames(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """The frames that have come. Raises `NotHttp2` and `ConnectionFault`."""
        return self._reader.feed(data)

    def take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Do what a frame says: its type, flags, stream and payload. Raises `ConnectionFault`."""
        if not self._has_settings:
            self._greet(kind, flags)
        if self._blocks.unfinished and kind != frames.CONTINUATION:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a header block was interrupted")
        handler = _ON.get(kind)
        if handler is None:
            self._idle_talk.spend()  # of an unknown type: to be ignored
            return
        try:
            handler(self, flags, number, payload)
        except StreamFault as fault:
            self._end_stream(number, fault)

    def _greet(self, kind: int, flags: int) -> None:
        """The first frame: that of who speaks HTTP/2 is SETTINGS. Ours waited, as HTTP/1 clients cannot read them."""
        if kind != frames.SETTINGS or flags & frames.ACK:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        self._has_settings = True
        connection, options = self._connection, self._connection.options
        settings = {
            frames.MAX_CONCURRENT_STREAMS: options.max_streams,
            frames.INITIAL_WINDOW_SIZE: options.stream_window,
            frames.MAX_FRAME_SIZE: options.max_frame,
            frames.MAX_HEADER_LIST_SIZE: options.max_header_list,
        }
        connection.output.write(frames.settings_frame(settings))
        if options.connection_window > DEFAULT_WINDOW:
            connection.output.write(frames.window_update(0, options.connection_window - DEFAULT_WINDOW))
        connection.keepalive.greeted()

    def _end_stream(self, number: int, fault: StreamFault) -> None:
        logger.debug("HTTP/2 stream %d of %s ends: %s", number, self._connection.peer, fault)
        self._resets.spend()  # it costs the same, whoever resets
        stream = self._connection.streams.get(number)
        if stream is None:
            self._connection.output.write(frames.reset_frame(number, fault.code))
        else:
            stream.reset(fault.code)
            stream.events.on_reset()

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        if not self._window.take(size):
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the connection's window")
        # What is buffered is bounded by the windows of the streams: the connection's only has to keep up.
        increment = self._window.give_back(size)
        if increment:
            self._connection.output.write(frames.window_update(0, increment))
        data = frames.strip_padding(payload, flags) if flags & frames.PADDED else payload
        if not data and not flags & END_STREAM:
            self._idle_talk.spend()
        stream = self._connection.streams.get(number)
        if stream is None:
            self._refuse_idle(number)
            return  # has ended here: the client may not know yet
        stream.take(size, len(data), bool(flags & END_STREAM))
        if data:
            stream.events.on_data(data)
        if stream.closed_there and not stream.closed_here:
            stream.events.on_end()

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        block = self._blocks.headers(flags, number, payload)
        if block is not None:
            self._on_block(block)

    def _on_continuation(self, flags: int, number: int, payload: bytes) -> None:
        self._idle_talk.spend()
        block = self._blocks.continuation(flags, number, payload)
        if block is not None:
            self._on_block(block)

    def _on_block(self, block: HeaderBlock) -> None:
        """A header block is complete: of a new stream, or the trailers of one."""
        number = block.stream
        if number % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"client opens stream {number}")
        headers = self._decoder.decode(block.data)
        if number > self.last_stream:
            self.last_stream = number
            length = headers.check_request()
            complete = bool(block.flags & END_STREAM)
            if complete and length:
                raise StreamFault(ErrorCode.PROTOCOL_ERROR, "less data than content-length")
            self._connection.begin_stream(number, complete, headers, length)
            return
        stream = self._connection.streams.get(number)
        if stream is None:
            if headers and headers[0][0].startswith(b":"):
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {number} is not new")
            return  # trailers of a stream that has ended here
        fault = trailers_fault(headers)
        if stream.closed_there:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "headers after the end")
        if not block.flags & END_STREAM or fault is not None:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, fault or "second headers that are no trailers")
        stream.end_there()
        stream.events.on_end()

    def _on_priority(self, flags: int, number: int, payload: bytes) -> None:
        """It means nothing any more."""
        self._idle_talk.spend()
        if number == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "PRIORITY of the connection")
        if len(payload) != 5:
            raise StreamFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of a broken length")

    def _on_reset(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a broken length")
        self._refuse_idle(number)
        self._resets.spend()
        stream = self._connection.streams.get(number)
        if stream is not None:
            stream.abandon()
            stream.events.on_reset()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        self._of_connection(number, "SETTINGS")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a broken length")
            return
        self._idle_talk.spend()
        connection = self._connection
        growth = connection.peer_settings.update(payload)
        connection.max_frame = connection.peer_settings.max_frame
        connection.output.write(frames.SETTINGS_ACK)
        if growth:
            try:
                for stream in list(connection.streams.values()):
                    stream.widen(growth)
            except StreamFault as fault:
                raise ConnectionFault(fault.code, str(fault)) from None

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        self._of_connection(number, "PING")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING of a broken length")
        if flags & frames.ACK:
            self._connection.farewell.answered(payload)
            return
        self._connection.keepalive.pinged()
        self._connection.output.write(frames.ping_frame(payload, frames.ACK))

    def _on_goaway(self, flags: int, number: int, payload: bytes) -> None:
        self._of_connection(number, "GOAWAY")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of a broken length")
        self._connection.leave()

    def _on_window_update(self, flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a broken length")
        increment = int.from_bytes(payload, "big") & MAX_WINDOW
        if number == 0:
            if increment == 0:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
            if self._connection.send_window + increment > MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "window out of range")
            self._connection.widen(increment)
            return
        stream = self._connection.streams.get(number)
        if stream is None:
            self._refuse_idle(number)
            return
        if increment == 0:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
        stream.widen(increment)

    def _on_push_promise(self, flags: int, number: int, payload: bytes) -> None:
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "a client pushes")

    def _refuse_idle(self, number: int) -> None:
        if number == 0 or number > self.last_stream or number % 2 == 0:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"stream {number} is idle")

    def _of_connection(self, number: int, name: str) -> None:
        if number:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"{name} on a stream")


_ON = {
    frames.DATA: Incoming._on_data,
    frames.HEADERS: Incoming._on_headers,
    frames.PRIORITY: Incoming._on_priority,
    frames.RST_STREAM: Incoming._on_reset,
    frames.SETTINGS: Incoming._on_settings,
    frames.PUSH_PROMISE: Incoming._on_push_promise,
    frames.PING: Incoming._on_ping,
    frames.GOAWAY: Incoming._on_goaway,
    frames.WINDOW_UPDATE: Incoming._on_window_update,
    frames.CONTINUATION: Incoming._on_continuation,
}
