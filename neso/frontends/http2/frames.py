"""Frames of HTTP/2 (RFC 9113, sections 4, 6 and 7)."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_SIZE = 9
DEFAULT_WINDOW = 65_535
DEFAULT_MAX_FRAME = 16_384
MAX_WINDOW = 2**31 - 1

# Types.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)

# Flags. ACK has the value of END_STREAM, on other types.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

# Settings.
(
    HEADER_TABLE_SIZE,
    ENABLE_PUSH,
    MAX_CONCURRENT_STREAMS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_HEADER_LIST_SIZE,
) = range(1, 7)


class ErrorCode(IntEnum):
    """Why a stream or a connection ends."""

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


class ConnectionFault(Exception):
    """The client broke the protocol: the connection ends with this code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFault(Exception):
    """The client broke the protocol on one stream: that ends with this code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def frame_header(length: int, kind: int, flags: int, stream: int) -> bytes:
    """The nine bytes before a frame's payload."""
    return _HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream)


def settings_frame(settings: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    payload = b"".join(_SETTING.pack(name, value) for name, value in settings.items())
    return frame_header(len(payload), SETTINGS, 0, 0) + payload


SETTINGS_ACK = b"\0\0\0\x04\x01\0\0\0\0"


def parse_settings(payload: bytes) -> dict[int, int]:
    """Names and values; of a name that comes several times the last one. Raises `ConnectionFault`."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a broken length")
    return dict(_SETTING.iter_unpack(payload))


def window_update(stream: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame_header(4, WINDOW_UPDATE, 0, stream) + increment.to_bytes(4, "big")


def reset_frame(stream: int, code: ErrorCode) -> bytes:
    """A RST_STREAM frame."""
    return frame_header(4, RST_STREAM, 0, stream) + code.to_bytes(4, "big")


def ping_frame(payload: bytes, flags: int = 0) -> bytes:
    """A PING frame; the payload has eight bytes."""
    return frame_header(8, PING, flags, 0) + payload


def header_frames(stream: int, block: bytes, flags: int, max_frame: int) -> bytes:
    """A header block as a HEADERS frame, and CONTINUATIONs for what does not fit."""
    if len(block) <= max_frame:
        return frame_header(len(block), HEADERS, flags | END_HEADERS, stream) + block
    pieces = [block[at : at + max_frame] for at in range(0, len(block), max_frame)]
    frames = [frame_header(len(pieces[0]), HEADERS, flags, stream) + pieces[0]]
    frames += [frame_header(len(piece), CONTINUATION, 0, stream) + piece for piece in pieces[1:-1]]
    frames.append(frame_header(len(pieces[-1]), CONTINUATION, END_HEADERS, stream) + pieces[-1])
    return b"".join(frames)


def goaway_frame(last_stream: int, code: ErrorCode, message: str = "") -> bytes:
    """A GOAWAY frame."""
    payload = last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + message.encode()
    return frame_header(len(payload), GOAWAY, 0, 0) + payload


def strip_padding(payload: bytes, flags: int) -> bytes:
    """The payload of a DATA or HEADERS frame without its padding. Raises `ConnectionFault`."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "no length of the padding")
    if payload[0] >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - payload[0]]


_HEADER = struct.Struct(">HBBBL")
_SETTING = struct.Struct(">HL")
