"""Frames out of the bytes that arrive."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from neso.frontends.http2.frames import HEADER_SIZE, MAX_WINDOW, PREFACE, ConnectionFault, ErrorCode

_HEADER = struct.Struct(">LBL")


class NotHttp2(Exception):
    """The client speaks something else. `http1`: by its first bytes, HTTP/1."""

    def __init__(self, http1: bool) -> None:
        super().__init__("no HTTP/2 connection preface")
        self.http1 = http1


class FrameReader:
    """Of one connection. What it holds back is less than a frame."""

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._partial = bytearray()
        self._needed = 0
        self.greeted = False

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Type, flags, stream and payload of each frame that is complete now.

        Raises `NotHttp2`, and `ConnectionFault` for a frame that is too large.
        """
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        at, size = 0, len(data)
        if not self.greeted:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise NotHttp2(data[:1].isalpha())
            if size < len(PREFACE):
                self._partial += data
                return
            self.greeted = True
            at = len(PREFACE)
        self._needed = HEADER_SIZE
        unpack, max_frame = _HEADER.unpack_from, self._max_frame
        while size - at >= HEADER_SIZE:
            word, flags, stream = unpack(data, at)
            length = word >> 8
            if length > max_frame:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes")
            end = at + HEADER_SIZE + length
            if end > size:
                self._needed = HEADER_SIZE + length
                break
            yield word & 0xFF, flags, stream & MAX_WINDOW, data[at + HEADER_SIZE : end]
            at = end
        if at < size:
            self._partial += data[at:]
