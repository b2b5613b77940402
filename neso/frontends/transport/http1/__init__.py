"""HTTP/1.1 server on httptools and asyncio, with an adapter for ASGI applications."""

from neso.frontends.transport.http1.asgi import AsgiApp, AsgiServer
from neso.frontends.transport.http1.messages import (
    Handler,
    HandlerResult,
    Headers,
    PendingResponse,
    Request,
    Response,
    StreamingResponse,
    error_body,
    error_response,
    json_response,
)
from neso.frontends.transport.http1.parser import Rejection
from neso.frontends.transport.http1.router import Router
from neso.frontends.transport.http1.server import BindError, HttpServer, HttpServerOptions

__all__ = [
    "AsgiApp",
    "AsgiServer",
    "BindError",
    "Handler",
    "HandlerResult",
    "Headers",
    "HttpServer",
    "HttpServerOptions",
    "PendingResponse",
    "Rejection",
    "Request",
    "Response",
    "Router",
    "StreamingResponse",
    "error_body",
    "error_response",
    "json_response",
]
