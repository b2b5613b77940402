"""gRPC over HTTP/2: length-prefixed messages, metadata, response headers and status trailers."""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from neso.frontends.transport.grpc.compression import Inflation, MessageError
from neso.frontends.transport.http2 import Headers, encode_headers

Metadata = tuple[tuple[str, "str | bytes"], ...]

PREFIX_SIZE = 5  # compressed flag, length
_SMALL = 1024  # bytes; smaller pieces of a body are joined, because each object has an overhead

# Headers of the protocol. All other headers are the client's metadata.
_RESERVED = frozenset(
    {
        "te",
        "content-type",
        "content-length",
        "grpc-timeout",
        "grpc-encoding",
        "grpc-accept-encoding",
        "accept-encoding",
        "host",
    }
)
_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}

# Encoded header blocks.
STATUS_200 = b"\x88"  # entry of the static table for ":status: 200"
_CONTENT = ((b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"identity, deflate, gzip"))
RESPONSE_HEADERS = STATUS_200 + encode_headers(_CONTENT)
GZIP_RESPONSE_HEADERS = RESPONSE_HEADERS + encode_headers([(b"grpc-encoding", b"gzip")])
OK_TRAILERS = encode_headers([(b"grpc-status", b"0")])

# Clients drop responses with more than 8 KiB of headers, including the status message.
_MAX_STATUS_MESSAGE = 6 << 10
_ELLIPSIS = b"..."


class MessageReader:
    """Splits the body of a request into messages. `max_message`: bytes of a message, before and after decompression."""

    __slots__ = ("_available", "_compressed", "_encoding", "_length", "_max_message", "_pieces", "_pos")

    def __init__(self, encoding: str, max_message: int) -> None:
        self._encoding = encoding
        self._max_message = max_message
        self._pieces: deque[bytes | bytearray] = deque()
        self._pos = 0  # in the first piece
        self._available = 0  # bytes in all pieces
        # Prefix of the next message; length -1: not read yet.
        self._length = -1
        self._compressed = False

    def feed(self, data: bytes) -> None:
        """Add a part of the body."""
        self._available += len(data)
        pieces = self._pieces
        if pieces and len(data) < _SMALL:
            last = pieces[-1]
            if isinstance(last, bytearray):
                last += data
            else:
                pieces.append(bytearray(data))
        else:
            pieces.append(data)

    def read_whole(self, data: bytes) -> bytes | None:
        """Return the message if `data` is one whole message without compression, the common case; else None."""
        size = len(data) - PREFIX_SIZE
        if size < 0 or data[0] or self._available or self._length >= 0 or size > self._max_message:
            return None
        return data[PREFIX_SIZE:] if int.from_bytes(data[1:PREFIX_SIZE], "big") == size else None

    def read(self) -> bytes | Inflation | None:
        """Return the next message, or None if it is not complete yet. Raises `MessageError`."""
        length = self._length
        if length < 0:
            if self._available < PREFIX_SIZE:
                return None
            length = self._parse_prefix(self._take(PREFIX_SIZE))
        if self._available < length:
            return None
        message = self._take(length)
        self._length = -1
        return Inflation(message, self._encoding, self._max_message) if self._compressed else message

    def clear(self) -> None:
        """Drop the bytes that were not read."""
        self._pieces.clear()
        self._available = self._pos = 0

    @property
    def missing(self) -> int:
        """Bytes that the incomplete message lacks, as far as known; 0 between messages."""
        if self._length >= 0:
            return self._length - self._available
        return PREFIX_SIZE - self._available if self._available else 0

    @property
    def size(self) -> int:
        """Length of the incomplete message, 0 if not known."""
        return max(self._length, 0)

    def _parse_prefix(self, prefix: bytes) -> int:
        flag, length = prefix[0], int.from_bytes(prefix[1:], "big")
        if flag > 1:
            raise MessageError(grpc.StatusCode.INTERNAL, f"message has an invalid compressed flag: {flag}")
        if length > self._max_message:
            raise MessageError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"Received message larger than max ({length} vs. {self._max_message})",
            )
        self._compressed = flag == 1
        self._length = length
        return length

    def _take(self, size: int) -> bytes:
        """Remove `size` bytes, which are available."""
        self._available -= size
        parts: list[bytes | bytearray] = []
        while size:
            first, pos = self._pieces[0], self._pos
            part = first[pos : pos + size]
            size -= len(part)
            if pos + len(part) == len(first):
                self._pieces.popleft()
                self._pos = 0
            else:
                self._pos = pos + len(part)
            parts.append(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)


def message_prefix(message: bytes) -> bytes:
    """Return the prefix of an uncompressed message."""
    return b"\x00" + len(message).to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """Parsed headers of a call. `timeout`: seconds, None without a deadline. `encoding`: of the request's messages."""

    method: str
    path: str
    content_type: str
    encoding: str
    accepts_gzip: bool
    timeout: float | None
    metadata: Metadata

    @classmethod
    def parse(cls, headers: Headers) -> CallHeaders:
        """Parse headers. Raises `ValueError` for malformed gRPC headers."""
        reserved: dict[str, str] = {}
        metadata: list[tuple[str, str | bytes]] = []
        for raw_name, raw_value in headers:
            name = raw_name.decode("ascii")
            if name.endswith("-bin"):
                metadata += [(name, _decode_binary(value)) for value in raw_value.split(b",")]
                continue
            value = raw_value.decode("latin-1").strip(" \t")
            if name in _RESERVED or name.startswith(":"):
                reserved[name] = value
            else:
                metadata.append((name, value))
        timeout = reserved.get("grpc-timeout")
        accepted = reserved.get("grpc-accept-encoding", "").split(",")
        return cls(
            reserved.get(":method", ""),
            reserved.get(":path", ""),
            reserved.get("content-type", ""),
            reserved.get("grpc-encoding", "identity"),
            "gzip" in (each.strip() for each in accepted),
            None if timeout is None else _parse_timeout(timeout),
            tuple(metadata),
        )

    @property
    def is_grpc(self) -> bool:
        """Whether the content type is that of gRPC, with any serialization, but not grpc-web."""
        prefix, rest = self.content_type[:16].lower(), self.content_type[16:17]
        return prefix == "application/grpc" and rest in ("", "+", ";")


def status_trailers(code: grpc.StatusCode, message: str, metadata: Metadata = ()) -> bytes:
    """Return the header block that ends a response."""
    if code is grpc.StatusCode.OK and not message and not metadata:
        return OK_TRAILERS
    fields = [
        (b"grpc-status", str(code.value[0]).encode()),
        (b"grpc-message", encode_status_message(message)),
    ]
    return encode_headers([*fields, *_encode_metadata(metadata)])


def http_status(status: int) -> bytes:
    """Return the header block of a plain HTTP response."""
    return encode_headers([(b":status", str(status).encode())])


def encode_status_message(text: str) -> bytes:
    """Percent-encode a grpc-message; printable ASCII except "%" is unchanged. Long messages are truncated."""
    encoded: list[bytes] = []
    size = 0
    for character in text:
        data = character.encode("utf-8", "replace")
        byte = data[0]
        part = data if 0x20 <= byte <= 0x7E and byte != 0x25 else b"".join(b"%%%02X" % each for each in data)
        size += len(part)
        if size > _MAX_STATUS_MESSAGE:
            encoded.append(_ELLIPSIS)
            break
        encoded.append(part)
    return b"".join(encoded)


def _encode_metadata(metadata: Metadata) -> Iterator[tuple[bytes, bytes]]:
    """Encode metadata as header fields."""
    for name, value in metadata:
        if name.endswith("-bin"):
            data = value if isinstance(value, bytes) else value.encode()
            yield name.encode("ascii"), base64.b64encode(data).rstrip(b"=")
        else:
            yield name.encode("ascii"), value if isinstance(value, bytes) else value.encode("latin-1")


def _parse_timeout(text: str) -> float:
    """Parse a grpc-timeout header into seconds. Raises `ValueError`."""
    unit, number = _SECONDS.get(text[-1:]), text[:-1]
    if unit is None or not (number.isascii() and number.isdigit()) or len(number) > 8:
        raise ValueError(f"malformed grpc-timeout '{text}'")
    return int(number) * unit


def _decode_binary(value: bytes) -> bytes:
    """Decode base64 with or without padding. Raises `ValueError`."""
    value = value.strip().rstrip(b"=")
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error as error:
        raise ValueError(f"malformed binary metadata: {error}") from None
