"""Header blocks (RFC 7541): assembly from frames, cached decoding, validation of requests, encoding.

Responses are encoded as literals without the dynamic table, so an encoded block is valid on any connection.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

import hpack

from neso.frontends.transport.http2 import frames
from neso.frontends.transport.http2.frames import ErrorCode, Http2ConnectionError, Http2StreamError

# hpack logs every header at DEBUG, with values that may be secret.
logging.getLogger("hpack").setLevel(logging.WARNING)

_MAX_CACHED = 64  # header blocks of a connection
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_INVALID_VALUE = re.compile(rb"[\0\r\n]")
_CONNECTION_SPECIFIC = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_REQUIRED = (b":method", b":scheme", b":path")

Fields = Iterable[tuple[bytes, bytes]]


class Headers(list[tuple[bytes, bytes]]):
    """Names and values of a request, in order. Requests of a connection with identical blocks share one instance.

    `parsed`: cache for the application, None at first.
    """

    __slots__ = ("_error", "_length", "parsed")

    def __init__(self, fields: Fields) -> None:
        super().__init__(fields)
        self.parsed: Any = None
        self._error: str | None = None  # None: not validated yet; empty: valid
        self._length: int | None = None

    def validate_request(self) -> int | None:
        """Return the Content-Length or None. Raises `Http2StreamError` for invalid request headers."""
        if self._error is None:
            try:
                self._length = _content_length(self)
                self._error = _request_error(self) or ""
            except ValueError as error:
                self._error = str(error)
        if self._error:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, self._error)
        return self._length


class HeaderDecoder:
    """Decodes the header blocks of one connection.

    Clients repeat the headers of their requests; from the second request on, the block consists of the same few
    references to the dynamic table. Such a block is cached until a block that may change the table arrives.
    """

    def __init__(self, max_list: int) -> None:
        self._decoder = hpack.Decoder(max_list)
        self._cache: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """Decode names and values, in order. Raises `Http2ConnectionError`: the dynamic tables may be out of sync."""
        cached = self._cache.get(block)
        if cached is not None:
            return cached
        try:
            fields = self._decoder.decode(block, raw=True)
            headers = Headers((bytes(name), bytes(value)) for name, value in fields)
        except hpack.OversizedHeaderListError:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from None
        except (hpack.HPACKError, UnicodeDecodeError, IndexError, ValueError) as error:
            raise Http2ConnectionError(
                ErrorCode.COMPRESSION_ERROR, f"invalid header block: {error}"
            ) from None
        if changes_dynamic_table(block) or len(self._cache) >= _MAX_CACHED:
            self._cache.clear()
        else:
            self._cache[block] = headers
        return headers


def changes_dynamic_table(block: bytes) -> bool:
    """Whether a valid header block adds an entry to the dynamic table or resizes it (RFC 7541, section 6)."""
    pos, size = 0, len(block)
    while pos < size:
        first = block[pos]
        if first & 0x80:  # indexed field
            _, pos = _read_integer(block, pos, 0x7F)
        elif first & 0x60:  # literal with incremental indexing, or table size update
            return True
        else:  # literal without indexing, or never indexed
            name_index, pos = _read_integer(block, pos, 0x0F)
            for _ in range(1 if name_index else 2):  # value, preceded by the name unless the name is indexed
                length, pos = _read_integer(block, pos, 0x7F)
                pos += length
    return False


def encode_headers(headers: Fields) -> bytes:
    """Encode a header block as literals without indexing, which is valid on any connection."""
    return b"".join(b"\x00" + _length(name) + name + _length(value) + value for name, value in headers)


class HeaderBlockReader:
    """Joins a HEADERS frame and its CONTINUATION frames. `max_size`: bytes per block.

    `open`: stream id and flags of an incomplete block, whose next frame must be a CONTINUATION; None otherwise.
    `depends_on`: the stream that the last HEADERS frame depends on, 0 without a priority.
    """

    def __init__(self, max_size: int) -> None:
        self._max_size = max_size
        self._data = bytearray()
        self.open: tuple[int, int] | None = None
        self.depends_on = 0

    def on_headers(self, flags: int, stream: int, payload: bytes) -> bytes | None:
        """Return the block if the HEADERS frame completes it. Raises `Http2ConnectionError`."""
        if flags & frames.PADDED:
            payload = frames.strip_padding(payload, flags)
        if flags & frames.HAS_PRIORITY:
            if len(payload) < 5:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS with an invalid length")
            self.depends_on = int.from_bytes(payload[:4], "big") & frames.MAX_WINDOW
            payload = payload[5:]
        elif self.depends_on:
            self.depends_on = 0
        if len(payload) > self._max_size:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if flags & frames.END_HEADERS:
            return payload
        self.open = stream, flags
        self._data += payload
        return None

    def on_continuation(self, flags: int, stream: int, payload: bytes) -> tuple[int, bytes] | None:
        """Return flags of the HEADERS frame and the block, if the CONTINUATION frame completes it.

        Raises `Http2ConnectionError`.
        """
        if self.open is None or self.open[0] != stream:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a header block")
        self._data += payload
        if len(self._data) > self._max_size:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "header block too large")
        if not flags & frames.END_HEADERS:
            return None
        headers_flags, block = self.open[1], bytes(self._data)
        self.open = None
        self._data.clear()
        return headers_flags, block


def trailers_error(fields: Fields) -> str | None:
    """Return why trailers are invalid (RFC 9113, section 8.1), or None if they are valid."""
    errors = (_field_error(name, value) for name, value in fields)
    return next((error for error in errors if error is not None), None)


def _request_error(fields: Fields) -> str | None:
    """Return why request headers are invalid (RFC 9113, sections 8.2 and 8.3), or None if they are valid."""
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in fields:
        if not name.startswith(b":"):
            regular = True
            if (error := _field_error(name, value)) is not None:
                return error
        elif regular or name in pseudo or name not in _PSEUDO or _INVALID_VALUE.search(value):
            return f"invalid pseudo-header {name!r}"
        else:
            pseudo[name] = value
    missing = [name for name in _REQUIRED if not pseudo.get(name)]
    return f"missing {missing[0].decode()}" if missing else None


def _content_length(fields: Fields) -> int | None:
    """Return the value of Content-Length, or None if it is absent. Raises `ValueError`."""
    values = {value for name, value in fields if name == b"content-length"}
    if not values:
        return None
    if len(values) > 1 or not (value := values.pop()).isdigit() or len(value) > 18:
        raise ValueError("invalid content-length")
    return int(value)


def _field_error(name: bytes, value: bytes) -> str | None:
    if _NAME.fullmatch(name) is None:
        return f"invalid header name {name!r}"
    if name in _CONNECTION_SPECIFIC or (name == b"te" and value != b"trailers"):
        return f"header {name!r} is not allowed in HTTP/2"
    return f"invalid value of header {name!r}" if _INVALID_VALUE.search(value) else None


def _read_integer(block: bytes, pos: int, mask: int) -> tuple[int, int]:
    """Decode the integer at `pos` with prefix `mask`; also return the position after it (RFC 7541, section 5.1)."""
    value = block[pos] & mask
    pos += 1
    if value < mask:
        return value, pos
    shift = 0
    while True:
        byte = block[pos]
        pos += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7


def _length(data: bytes) -> bytes:
    """Decode the length of a string literal without Huffman coding: an integer with a 7-bit prefix."""
    value = len(data)
    if value < 127:
        return bytes((value,))
    value -= 127
    encoded = bytearray((127,))
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
