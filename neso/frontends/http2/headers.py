"""Header blocks (RFC 7541): read by hpack, with a memory for those that come again; written without compression."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hpack

from neso.frontends.http2.frames import ConnectionFault, ErrorCode, StreamFault
from neso.frontends.http2.request_headers import content_length, request_fault

_MOST_REMEMBERED = 64


class Headers(list[tuple[bytes, bytes]]):
    """Names and values, in order. Requests with the same block share them, and what the application `made` of them."""

    __slots__ = ("_length", "_verdict", "made")

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__(fields)
        self.made: Any = None
        self._verdict: str | None = (
            None  # what is wrong with the request; empty: nothing is; None: not looked at
        )
        self._length: int | None = None

    def check_request(self) -> int | None:
        """How long the body is said to be. Raises `StreamFault` if these are not the headers of a request."""
        if self._verdict is None:
            try:
                self._length = content_length(self)
                self._verdict = request_fault(self) or ""
            except ValueError as error:
                self._verdict = str(error)
        if self._verdict:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, self._verdict)
        return self._length


class HeaderDecoder:
    """Of one connection.

    A client that sends the same headers again sends, from the second time on, the same few bytes, all of which refer
    to the dynamic table. What such a block means is remembered until something enters the table.
    """

    def __init__(self, max_list: int) -> None:
        self._decoder = hpack.Decoder(max_list)
        self._remembered: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """Names and values, in order. Raises `ConnectionFault`: the tables of both sides may differ then."""
        found = self._remembered.get(block)
        if found is not None:
            return found
        newest, size = self._table_state()
        try:
            fields = self._decoder.decode(block, raw=True)
            headers = Headers((bytes(name), bytes(value)) for name, value in fields)
        except hpack.OversizedHeaderListError:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from None
        except (hpack.HPACKError, UnicodeDecodeError, IndexError, ValueError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"broken header block: {error}") from None
        newest_now, size_now = self._table_state()
        if newest_now is not newest or size_now != size or len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.clear()
        else:
            self._remembered[block] = headers
        return headers

    def _table_state(self) -> tuple[Any, tuple[int, int]]:
        """Differs once something has entered or left the dynamic table: its newest entry, and its sizes."""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return entries[0] if entries else None, (len(entries), table.maxsize)


def encode_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A header block of literals that enter no table: it means the same on any connection."""
    return b"".join(b"\x00" + _length(name) + name + _length(value) + value for name, value in headers)


def _length(data: bytes) -> bytes:
    """An integer with a prefix of 7 bits, without Huffman coding (section 5.1)."""
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
