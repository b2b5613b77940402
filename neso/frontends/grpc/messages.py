"""Messages in the body of a stream: a flag, a length, and that many bytes ("Length-Prefixed-Message")."""

from __future__ import annotations

import gzip
import zlib

import grpc

ENCODINGS = ("identity", "deflate", "gzip")
_PREFIX = 5
_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}


class MessageFault(Exception):
    """What came is no message that can be taken."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class MessageReader:
    """Cuts messages out of the pieces of a body."""

    __slots__ = ("_compressed", "_encoding", "_left", "_max_message", "_pieces", "_prefix")

    def __init__(self, encoding: str, max_message: int) -> None:
        self._encoding = encoding
        self._max_message = max_message
        self._prefix = b""  # as far as it has come
        self._compressed = False
        self._pieces: list[bytes] = []  # of the message
        self._left = 0  # bytes of it that have not come

    def feed(self, piece: bytes) -> list[bytes]:
        """The messages that are complete now. Raises `MessageFault`."""
        size = len(piece)
        if size >= _PREFIX and not self._prefix and not piece[0]:
            length = int.from_bytes(piece[1:_PREFIX], "big")
            if length == size - _PREFIX and length <= self._max_message:
                return [piece[_PREFIX:]]  # as nearly always
        messages = []
        at = 0
        while at < size:
            missing = _PREFIX - len(self._prefix)
            if missing:
                self._prefix += piece[at : at + missing]
                at += missing
                if len(self._prefix) < _PREFIX:
                    break
                self._begin()
            part = piece[at : at + self._left]
            at += len(part)
            self._left -= len(part)
            self._pieces.append(part)
            if not self._left:
                messages.append(self._complete())
        return messages

    @property
    def in_message(self) -> bool:
        """Whether a part of a message has come."""
        return bool(self._prefix)

    def _begin(self) -> None:
        flag, length = self._prefix[0], int.from_bytes(self._prefix[1:], "big")
        if flag > 1:
            raise MessageFault(grpc.StatusCode.INTERNAL, f"a message with the unknown flag {flag}")
        if length > self._max_message:
            raise MessageFault(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"Received message larger than max ({length} vs. {self._max_message})",
            )
        self._compressed = flag == 1
        self._left = length

    def _complete(self) -> bytes:
        message = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._prefix = b""
        return self._decompress(message) if self._compressed else message

    def _decompress(self, message: bytes) -> bytes:
        bits = _WINDOW_BITS.get(self._encoding)
        if bits is None:
            raise MessageFault(grpc.StatusCode.INTERNAL, "a compressed message without grpc-encoding")
        decompressor = zlib.decompressobj(bits)
        try:
            # With room for one byte more: only then does zlib see that a message of the largest size has ended.
            plain = decompressor.decompress(message, self._max_message + 1)
        except zlib.error as error:
            raise MessageFault(
                grpc.StatusCode.INTERNAL, f"a message that cannot be decompressed: {error}"
            ) from None
        if len(plain) > self._max_message:
            raise MessageFault(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"Decompressed message larger than max ({self._max_message})",
            )
        if not decompressor.eof:
            raise MessageFault(grpc.StatusCode.INTERNAL, "a compressed message that is cut off")
        return plain


def compress_message(message: bytes, level: int) -> tuple[bytes, bytes]:
    """The prefix and the message, by gzip."""
    message = gzip.compress(message, level, mtime=0)
    return b"\x01" + len(message).to_bytes(4, "big"), message


def message_prefix(message: bytes) -> bytes:
    """The prefix of a message that goes as it is."""
    return b"\x00" + len(message).to_bytes(4, "big")
