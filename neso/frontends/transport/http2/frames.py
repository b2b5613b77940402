"""HTTP/2 frames: constants, error codes, writing and parsing (RFC 9113, sections 4, 6 and 7)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HTTP1_METHODS = (b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH ")
HEADER_SIZE = 9
DEFAULT_WINDOW = 65_535
DEFAULT_MAX_FRAME = 16_384
MAX_WINDOW = 2**31 - 1

# Frame types.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)

# Flags. ACK and END_STREAM share a value but apply to different frame types.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

# Settings identifiers.
(
    HEADER_TABLE_SIZE,
    ENABLE_PUSH,
    MAX_CONCURRENT_STREAMS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
) = range(1, 7)


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Http2ConnectionError(Exception):
    """Connection error (RFC 9113, section 5.4.1): the connection is closed with this code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Http2StreamError(Exception):
    """Stream error (RFC 9113, section 5.4.2): the stream is reset with this code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class PrefaceError(Exception):
    """The client did not send the HTTP/2 connection preface. `http1`: it sent an HTTP/1 request."""

    def __init__(self, http1: bool) -> None:
        super().__init__("no HTTP/2 connection preface")
        self.http1 = http1


class FrameReader:
    """Splits received bytes into frames. Buffers at most one incomplete frame."""

    def __init__(self, max_frame: int) -> None:
        self._max_frame = max_frame
        self._partial = bytearray()
        self._needed = 0
        self.preface_received = False

    def feed(self, data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield type, flags, stream id and payload of each complete frame.

        Raises `PrefaceError`, and `Http2ConnectionError` for a frame that is too large.
        """
        if self._partial:
            self._partial += data
            if len(self._partial) < self._needed:
                return
            data = bytes(self._partial)
            self._partial.clear()
        pos, size = 0, len(data)
        if not self.preface_received:
            if not PREFACE.startswith(data[: len(PREFACE)]):
                raise PrefaceError(any(method.startswith(data[: len(method)]) for method in _HTTP1_METHODS))
            if size < len(PREFACE):
                self._partial += data
                return
            self.preface_received = True
            pos = len(PREFACE)
        self._needed = HEADER_SIZE
        unpack, max_frame = _READ_HEADER.unpack_from, self._max_frame
        while size - pos >= HEADER_SIZE:
            word, flags, stream = unpack(data, pos)
            length = word >> 8
            if length > max_frame:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, f"frame of {length} bytes")
            end = pos + HEADER_SIZE + length
            if end > size:
                self._needed = HEADER_SIZE + length
                break
            yield word & 0xFF, flags, stream & MAX_WINDOW, data[pos + HEADER_SIZE : end]
            pos = end
        if pos < size:
            self._partial += data[pos:]


def frame_header(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Encode the nine-byte frame header. `kind`: frame type."""
    return _WRITE_HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream)


def settings_frame(settings: dict[int, int]) -> bytes:
    """Encode a SETTINGS frame."""
    payload = b"".join(_SETTING.pack(name, value) for name, value in settings.items())
    return frame_header(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK = b"\0\0\0\x04\x01\0\0\0\0"


def parse_settings(payload: bytes) -> dict[int, int]:
    """Parse values by identifier; the last value of a repeated identifier wins. Raises `Http2ConnectionError`."""
    if len(payload) % _SETTING.size:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS with an invalid length")
    return dict(_SETTING.iter_unpack(payload))


def window_update(stream: int, increment: int) -> bytes:
    """Encode a WINDOW_UPDATE frame; stream 0 means the connection."""
    return frame_header(4, WINDOW_UPDATE, 0, stream) + increment.to_bytes(4, "big")


def reset_frame(stream: int, code: ErrorCode) -> bytes:
    """Encode an RST_STREAM frame."""
    return frame_header(4, RST_STREAM, 0, stream) + code.to_bytes(4, "big")


def ping_frame(payload: bytes, flags: int = 0) -> bytes:
    """Encode a PING frame; the payload is eight bytes."""
    return frame_header(8, PING, flags, 0) + payload


def header_frames(stream: int, block: bytes, flags: int, max_frame: int) -> bytes:
    """Encode a header block as a HEADERS frame, followed by CONTINUATION frames if it exceeds `max_frame`."""
    if len(block) <= max_frame:
        return frame_header(len(block), HEADERS, flags | END_HEADERS, stream) + block
    pieces = [block[pos : pos + max_frame] for pos in range(0, len(block), max_frame)]
    frames = [frame_header(len(pieces[0]), HEADERS, flags, stream) + pieces[0]]
    frames += [frame_header(len(piece), CONTINUATION, 0, stream) + piece for piece in pieces[1:-1]]
    frames.append(frame_header(len(pieces[-1]), CONTINUATION, END_HEADERS, stream) + pieces[-1])
    return b"".join(frames)


def goaway_frame(last_stream: int, code: ErrorCode, message: str = "") -> bytes:
    """Encode a GOAWAY frame."""
    payload = last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + message.encode()
    return frame_header(len(payload), GOAWAY, 0, 0) + payload


def strip_padding(payload: bytes, flags: int) -> bytes:
    """Return the payload of a DATA or HEADERS frame without its padding. Raises `Http2ConnectionError`."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "missing pad length")
    if payload[0] >= len(payload):
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "padding exceeds the payload")
    return payload[1 : len(payload) - payload[0]]


# Length and type share the first four bytes: read as one word, written as 16 + 8 bits and 8 bits.
_READ_HEADER = struct.Struct(">LBL")
_WRITE_HEADER = struct.Struct(">HBBBL")
_SETTING = struct.Struct(">HL")
