"""Heads and trailers of responses."""

from __future__ import annotations

import grpc

from neso.frontends.http2 import encode_headers

STATUS_200 = b"\x88"  # the static table's entry for ":status: 200"
_CONTENT = ((b"content-type", b"application/grpc"), (b"grpc-accept-encoding", b"identity, deflate, gzip"))
HEAD = STATUS_200 + encode_headers(_CONTENT)
GZIP_HEAD = HEAD + encode_headers([(b"grpc-encoding", b"gzip")])
OK = encode_headers([(b"grpc-status", b"0")])


def trailers(code: grpc.StatusCode, message: str) -> bytes:
    """The header block that ends a response."""
    if code is grpc.StatusCode.OK and not message:
        return OK
    number = str(code.value[0]).encode()
    return encode_headers([(b"grpc-status", number), (b"grpc-message", percent_encode(message))])


def http_status(status: int) -> bytes:
    """The header block of a response that is none of gRPC's."""
    return encode_headers([(b":status", str(status).encode())])


def percent_encode(text: str) -> bytes:
    """As grpc-message is to be written: printable ASCII but "%" as it is."""
    data = text.encode("utf-8", "replace")
    return b"".join(
        bytes((byte,)) if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in data
    )
