"""Compression of gRPC messages: gzip, and deflate (the zlib format)."""

from __future__ import annotations

import gzip
import zlib
from io import BytesIO

import grpc

ENCODINGS = ("identity", "deflate", "gzip")

_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}
_STEP = 64 << 10  # bytes of input, and the output of a first step
_LARGE_STEP = 1 << 20  # bytes of output of each further step


class MessageError(Exception):
    """A received message is invalid; the call ends with this status."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Inflation:
    """Decompresses one message in bounded steps: the first on the event loop, the rest of a large one in a thread.

    `limit`: bytes of the decompressed message; `size`: of the compressed one. Raises `MessageError` for an unknown
    encoding.
    """

    def __init__(self, message: bytes, encoding: str, limit: int) -> None:
        bits = _WINDOW_BITS.get(encoding)
        if bits is None:
            raise MessageError(grpc.StatusCode.INTERNAL, "compressed message without grpc-encoding")
        self._decompressor = zlib.decompressobj(bits)
        self._message = message
        self.size = len(message)
        self._pos = 0
        self._limit = limit
        self._output = BytesIO()
        self._complete = False
        self.cancelled = False

    def start(self) -> bytes | None:
        """Return the message if one step suffices, else None. Raises `MessageError`."""
        self._step(_STEP)
        return self._result() if self._complete else None

    def run(self) -> bytes:
        """Return the message. Raises `MessageError`. `cancelled` ends the work of another thread early."""
        while not self._complete and not self.cancelled:
            self._step(_LARGE_STEP)
        return self._result()

    def _step(self, size: int) -> None:
        """Add up to `size` bytes to the output. zlib copies the unused input in each step, so that is short, too."""
        piece = self._decompressor.unconsumed_tail
        if not piece:
            piece = self._message[self._pos : self._pos + _STEP]
            self._pos += len(piece)
        try:
            output = self._decompressor.decompress(piece, size)
        except zlib.error as error:
            raise MessageError(grpc.StatusCode.INTERNAL, f"cannot decompress message: {error}") from None
        self._output.write(output)
        if self._output.tell() > self._limit:
            raise MessageError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"Decompressed message larger than max ({self._limit})"
            )
        unread = self._decompressor.unconsumed_tail or self._pos < len(self._message)
        # Without input, zlib may still have output if it filled the last step.
        self._complete = self._decompressor.eof or not (unread or len(output) == size)

    def _result(self) -> bytes:
        if not self._decompressor.eof:
            raise MessageError(grpc.StatusCode.INTERNAL, "compressed message is truncated")
        return self._output.getvalue()


def compress_message(message: bytes, level: int) -> tuple[bytes, bytes]:
    """Return the prefix and the gzip-compressed message."""
    message = gzip.compress(message, level, mtime=0)
    return b"\x01" + len(message).to_bytes(4, "big"), message
