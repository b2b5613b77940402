"""A small HTTP/2 server on asyncio (RFC 9113): connections, streams, flow control. Header compression is hpack's."""

from neso.frontends.http2.connection import Http2Connection, Shared
from neso.frontends.http2.frames import ErrorCode
from neso.frontends.http2.headers import encode_headers
from neso.frontends.http2.options import Http2Options
from neso.frontends.http2.stream import Application, Http2Stream, StreamEvents

__all__ = [
    "Application",
    "ErrorCode",
    "Http2Connection",
    "Http2Options",
    "Http2Stream",
    "Shared",
    "StreamEvents",
    "encode_headers",
]
