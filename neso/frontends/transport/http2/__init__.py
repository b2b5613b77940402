"""HTTP/2 server on asyncio (RFC 9113): connections, streams and flow control. hpack decodes header blocks."""

from neso.frontends.transport.http2.connection import Http2Connection, ServerContext
from neso.frontends.transport.http2.frames import ErrorCode
from neso.frontends.transport.http2.headers import Headers, encode_headers
from neso.frontends.transport.http2.settings import Http2Options
from neso.frontends.transport.http2.stream import NO_EVENTS, Application, Http2Stream, StreamEvents

__all__ = [
    "NO_EVENTS",
    "Application",
    "ErrorCode",
    "Headers",
    "Http2Connection",
    "Http2Options",
    "Http2Stream",
    "ServerContext",
    "StreamEvents",
    "encode_headers",
]
