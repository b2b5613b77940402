"""Configuration of the server's connections, and the SETTINGS that a client sends (RFC 9113, section 6.5.2)."""

from __future__ import annotations

from dataclasses import dataclass

from neso.frontends.transport.http2 import frames
from neso.frontends.transport.http2.frames import (
    DEFAULT_MAX_FRAME,
    DEFAULT_WINDOW,
    MAX_WINDOW,
    ErrorCode,
    Http2ConnectionError,
)

_DEFAULT_TABLE_SIZE = 4096
_SET_TABLE_SIZE_0 = b"\x20"  # HPACK dynamic table size update; the encoder does not use the table
_MAX_FRAME = 1 << 20  # a larger frame is not faster and delays the other streams


@dataclass(frozen=True, slots=True)
class Http2Options:
    """Sizes are in bytes, times in seconds.

    `max_header_list`: of a request. `max_streams`: concurrent streams of a connection. `max_connection_memory`,
    `max_server_memory`: request data held for one connection and for all. `max_queued`: new requests are refused while
    more response data than this is queued. `write_timeout`: a client that reads no data for this long while the
    `write_buffer` is full is disconnected. `handshake_timeout`: time for a new connection to send its preface and
    SETTINGS. `turn`: after this long, the event loop serves other connections before the next frame of this one.

    A client may do `reset_burst` and `useless_burst` actions at once, and `reset_rate` and `useless_rate` per second,
    of those that cost the server more than the client: resets of streams, and frames without effect.

    `keepalive_time`: a client silent for this long receives a PING and has `keepalive_timeout` to respond. A client
    that sends PINGs more often than every `min_ping_interval` without receiving data, more than `max_ping_strikes`
    times, is disconnected. Without open streams the interval is two hours and the server sends no PINGs, unless
    `pings_without_streams`. `max_age`: connections are closed gracefully at this age, with 10% jitter to spread
    reconnects, and forcibly after another `max_age_grace`; None: no limit.
    """

    max_header_list: int = 16 << 10
    max_frame: int = 128 << 10
    max_streams: int = 256
    max_connection_memory: int = 256 << 20
    max_server_memory: int = 1 << 30
    reset_burst: int = 500
    reset_rate: float = 100.0
    useless_burst: int = 1000
    useless_rate: float = 100.0
    turn: float = 0.005
    max_queued: int = 256 << 20
    stream_window: int = 1 << 20
    connection_window: int = 16 << 20
    write_buffer: int = 256 << 10
    write_timeout: float = 60.0
    handshake_timeout: float = 20.0
    keepalive_time: float = 7200.0
    keepalive_timeout: float = 20.0
    min_ping_interval: float = 300.0
    max_ping_strikes: int = 2
    pings_without_streams: bool = False
    max_age: float | None = None
    max_age_grace: float | None = None


class PeerSettings:
    """Settings of the client. `table_update`, if not empty, must precede the next header block sent."""

    def __init__(self) -> None:
        self.initial_window = DEFAULT_WINDOW
        self.max_frame = DEFAULT_MAX_FRAME
        self.table_update = b""
        self._table_size_reduced = False

    def update(self, payload: bytes) -> int:
        """Apply a SETTINGS frame; return the change of the open streams' windows. Raises `Http2ConnectionError`."""
        settings = frames.parse_settings(payload)
        if settings.get(frames.ENABLE_PUSH, 0) > 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        max_frame = settings.get(frames.MAX_FRAME_SIZE, self.max_frame)
        if not DEFAULT_MAX_FRAME <= max_frame < 1 << 24:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "frame size out of range")
        self.max_frame = min(max_frame, _MAX_FRAME)
        table_size = settings.get(frames.HEADER_TABLE_SIZE, _DEFAULT_TABLE_SIZE)
        if table_size < _DEFAULT_TABLE_SIZE and not self._table_size_reduced:
            self._table_size_reduced = True
            self.table_update = _SET_TABLE_SIZE_0
        window = settings.get(frames.INITIAL_WINDOW_SIZE, self.initial_window)
        if window > MAX_WINDOW:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "initial window too large")
        growth, self.initial_window = window - self.initial_window, window
        return growth
