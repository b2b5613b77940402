"""Heads and trailers of responses."""

from __future__ import annotations

import grpc

from neso.frontends.grpc.metadata import Metadata, encode_metadata
from neso.frontends.http2 import encode_headers

STATUS_200 = b"\x88"  # the static table's entry for ":status: 200"
_CONTENT = ((b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"identity, deflate, gzip"))
HEAD = STATUS_200 + encode_headers(_CONTENT)
GZIP_HEAD = HEAD + encode_headers([(b"grpc-encoding", b"gzip")])
OK = encode_headers([(b"grpc-status", b"0")])

# Clients drop responses whose headers are larger than 8 KiB in all, and with them the reason.
_LONGEST_MESSAGE = 6 << 10
_CUT = b"..."


def trailers(code: grpc.StatusCode, message: str, metadata: Metadata = ()) -> bytes:
    """The header block that ends a response."""
    if code is grpc.StatusCode.OK and not message and not metadata:
        return OK
    fields = [(b"grpc-status", str(code.value[0]).encode()), (b"grpc-message", encode_message(message))]
    return encode_headers([*fields, *encode_metadata(metadata)])


def http_status(status: int) -> bytes:
    """The header block of a response that is none of gRPC's."""
    return encode_headers([(b":status", str(status).encode())])


def encode_message(text: str) -> bytes:
    """As grpc-message is to be written: printable ASCII but "%" as it is. What is too long for clients is cut."""
    encoded: list[bytes] = []
    size = 0
    for character in text:
        data = character.encode("utf-8", "replace")
        byte = data[0]
        piece = data if 0x20 <= byte <= 0x7E and byte != 0x25 else b"".join(b"%%%02X" % each for each in data)
        size += len(piece)
        if size > _LONGEST_MESSAGE:
            encoded.append(_CUT)
            break
        encoded.append(piece)
    return b"".join(encoded)
