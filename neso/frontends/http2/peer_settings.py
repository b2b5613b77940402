"""What the client has set for what it is sent (RFC 9113, section 6.5.2)."""

from __future__ import annotations

from neso.frontends.http2 import frames
from neso.frontends.http2.frames import (
    DEFAULT_MAX_FRAME,
    DEFAULT_WINDOW,
    MAX_WINDOW,
    ConnectionFault,
    ErrorCode,
)

_DEFAULT_TABLE = 4096
_SHRINK_TABLE = (
    b"\x20"  # an encoder's first word after the table was made smaller; ours is never used, so: to 0
)
_LARGEST_FRAME = 1 << 20  # more is of no use, and one stream would hold up the others


class PeerSettings:
    """`table_update` is to precede the next header block that is sent, if it is not empty."""

    def __init__(self) -> None:
        self.initial_window = DEFAULT_WINDOW
        self.max_frame = DEFAULT_MAX_FRAME
        self.table_update = b""
        self._table_shrunk = False

    def update(self, payload: bytes) -> int:
        """Apply a SETTINGS frame; by how much the windows of open streams grow. Raises `ConnectionFault`."""
        settings = frames.parse_settings(payload)
        if settings.get(frames.ENABLE_PUSH, 0) > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        max_frame = settings.get(frames.MAX_FRAME_SIZE, self.max_frame)
        if not DEFAULT_MAX_FRAME <= max_frame < 1 << 24:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "frame size out of range")
        self.max_frame = min(max_frame, _LARGEST_FRAME)
        if settings.get(frames.HEADER_TABLE_SIZE, _DEFAULT_TABLE) < _DEFAULT_TABLE and not self._table_shrunk:
            self._table_shrunk = True
            self.table_update = _SHRINK_TABLE
        window = settings.get(frames.INITIAL_WINDOW_SIZE, self.initial_window)
        if window > MAX_WINDOW:
            raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "initial window too large")
        growth, self.initial_window = window - self.initial_window, window
        return growth
