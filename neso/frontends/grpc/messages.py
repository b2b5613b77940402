"""Messages in the body of a stream: a flag, a length, and that many bytes ("Length-Prefixed-Message")."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator

ENCODINGS = ("identity", "deflate", "gzip")
_PREFIX = 5
_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}


class MessageFault(Exception):
    """What came is no message that can be taken. `code`: the name of the status."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class MessageReader:
    """Cuts messages out of the pieces of a body."""

    def __init__(self, encoding: str, max_message: int) -> None:
        self._encoding = encoding
        self._max_message = max_message
        self._pieces: list[bytes] = []
        self._size = 0
        self._needed = _PREFIX

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The messages that are complete now. Raises `MessageFault`."""
        self._pieces.append(piece)
        self._size += len(piece)
        while self._size >= self._needed:
            data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            length = int.from_bytes(data[1:_PREFIX], "big")
            self._needed = _PREFIX + length
            if length > self._max_message:
                raise MessageFault(
                    "RESOURCE_EXHAUSTED",
                    f"Received message larger than max ({length} vs. {self._max_message})",
                )
            if len(data) < self._needed:
                self._pieces = [data]
                return
            message, rest = data[_PREFIX : self._needed], data[self._needed :]
            self._pieces, self._size, self._needed = [rest], len(rest), _PREFIX
            yield self._decompress(message) if data[0] else message

    @property
    def in_message(self) -> bool:
        """Whether a part of a message has come."""
        return self._size > 0

    def _decompress(self, message: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise MessageFault("INTERNAL", "a compressed message without grpc-encoding")
        decompressor = zlib.decompressobj(bits)
        try:
            plain = decompressor.decompress(message, self._max_message)
        except zlib.error as error:
            raise MessageFault("INTERNAL", f"a message that cannot be decompressed: {error}") from None
        if decompressor.unconsumed_tail:
            raise MessageFault(
                "RESOURCE_EXHAUSTED", f"Decompressed message larger than max ({self._max_message})"
            )
        if not decompressor.eof:
            raise MessageFault("INTERNAL", "a compressed message that is cut off")
        return plain


def frame_message(message: bytes, compress_level: int | None) -> bytes:
    """A message with its prefix; compressed by gzip if it has a level."""
    if compress_level is not None:
        message = gzip.compress(message, compress_level, mtime=0)
        return b"\x01" + len(message).to_bytes(4, "big") + message
    return b"\x00" + len(message).to_bytes(4, "big") + message
