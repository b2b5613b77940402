"""A header block that comes in several frames."""

from __future__ import annotations

from typing import NamedTuple

from neso.frontends.http2 import frames
from neso.frontends.http2.frames import ConnectionFault, ErrorCode


class HeaderBlock(NamedTuple):
    """`flags`: of the HEADERS frame."""

    stream: int
    flags: int
    data: bytes


class HeaderBlockReader:
    """Joins a HEADERS frame and its CONTINUATIONs."""

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._open: tuple[int, int] | None = None  # stream and flags of the block that goes on
        self._data = bytearray()

    @property
    def unfinished(self) -> bool:
        """Whether nothing but a CONTINUATION may come."""
        return self._open is not None

    def headers(self, flags: int, stream: int, payload: bytes) -> HeaderBlock | None:
        """The block, if the frame has all of it. Raises `ConnectionFault`."""
        if flags & frames.PADDED:
            payload = frames.strip_padding(payload, flags)
        if flags & frames.HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS of a broken length")
            payload = payload[5:]
        if flags & frames.END_HEADERS:
            return HeaderBlock(stream, flags, payload)
        self._open = stream, flags
        self._data += payload
        return None

    def continuation(self, flags: int, stream: int, payload: bytes) -> HeaderBlock | None:
        """The block, if it is complete now. Raises `ConnectionFault`."""
        if self._open is None or self._open[0] != stream:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block")
        self._data += payload
        if len(self._data) > self._max_size:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if not flags & frames.END_HEADERS:
            return None
        block = HeaderBlock(*self._open, bytes(self._data))
        self._open = None
        self._data.clear()
        return block
