"""A small HTTP/1.1 server on httptools and asyncio, and a bridge for ASGI applications."""

from neso.frontends.http.asgi import AsgiApp, AsgiServer
from neso.frontends.http.deferred import DeferredResponse
from neso.frontends.http.handler import Answer, Handler
from neso.frontends.http.options import HttpServerOptions
from neso.frontends.http.request import Request
from neso.frontends.http.response import Response, StreamingResponse, error_response, json_response
from neso.frontends.http.router import Router
from neso.frontends.http.server import BindError, HttpServer

__all__ = [
    "Answer",
    "AsgiApp",
    "AsgiServer",
    "BindError",
    "DeferredResponse",
    "Handler",
    "HttpServer",
    "HttpServerOptions",
    "Request",
    "Response",
    "Router",
    "StreamingResponse",
    "error_response",
    "json_response",
]
