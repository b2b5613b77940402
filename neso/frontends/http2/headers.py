"""Header blocks (RFC 7541): read by hpack, with a memory for those that come again; written without compression."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import hpack

from neso.frontends.http2.frames import ConnectionFault, ErrorCode

_MOST_REMEMBERED = 64


class Headers(list[tuple[bytes, bytes]]):
    """Names and values, in order. Requests with the same block share them, and what the application `made` of them."""

    __slots__ = ("made",)

    def __init__(self, fields: Iterable[tuple[bytes, bytes]]) -> None:
        super().__init__(fields)
        self.made: Any = None


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
        before = self._table_state()
        try:
            fields = self._decoder.decode(block, raw=True)
            headers = Headers((bytes(name), bytes(value)) for name, value in fields)
        except hpack.OversizedHeaderListError:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "header list too large") from None
        except (hpack.HPACKError, UnicodeDecodeError, IndexError, ValueError) as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, f"broken header block: {error}") from None
        if self._table_state() != before or len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.clear()
        else:
            self._remembered[block] = headers
        return headers

    def _table_state(self) -> tuple[int, int, int]:
        """Differs once something has entered or left the dynamic table."""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return len(entries), id(entries[0]) if entries else 0, table.maxsize


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
