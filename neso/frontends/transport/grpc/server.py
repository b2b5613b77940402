"""gRPC server: options, listening socket, method lookup and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc

from neso.frontends.transport.grpc.call import CallbackCall, CallbackHandler, logger
from neso.frontends.transport.grpc.compression import ENCODINGS
from neso.frontends.transport.grpc.coroutine_call import CoroutineCall
from neso.frontends.transport.grpc.wire_format import (
    RESPONSE_HEADERS,
    CallHeaders,
    http_status,
    status_trailers,
)
from neso.frontends.transport.http2 import (
    NO_EVENTS,
    Headers,
    Http2Connection,
    Http2Options,
    Http2Stream,
    ServerContext,
    StreamEvents,
)
from neso.frontends.transport.tcp import ConnectionLimits
from neso.frontends.transport.tls import TlsListener, TlsOptions

_TLS_SHUTDOWN_TIMEOUT = 2.0  # seconds
_CANCEL_TIMEOUT = 5.0  # seconds for cancelled handlers to clean up
_INFLATE_THREADS = 2  # large messages that are decompressed at the same time


@dataclass(frozen=True, slots=True)
class GrpcServerOptions:
    """`max_message`: bytes of a message, also when decompressed. `max_parsed_message`: the same for methods with a
    deserializer, which runs on the event loop. `message_timeout`: seconds for a message to arrive after its first byte,
    beyond the time for its length. `compress_level`: gzip level of responses, None: uncompressed.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_message: int = 64 << 20
    max_parsed_message: int = 256 << 10
    message_timeout: float = 60.0
    compress_level: int | None = None
    reuse_port: bool = False
    tls: ssl.SSLContext | None = None
    backlog: int = 2048
    http2: Http2Options = field(default_factory=Http2Options)


class CallDetails(NamedTuple):
    """Argument of interceptors, like `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: Any


class GrpcServer:
    """Serves `grpc` method handlers with coroutines, and `CallbackHandler`s, on the running event loop.

    `interceptors` have the `intercept_service` of `grpc.aio.ServerInterceptor`, which must return without awaiting.
    `limits`: on connections, may be shared by servers.
    """

    def __init__(
        self,
        options: GrpcServerOptions,
        interceptors: tuple[Any, ...] = (),
        limits: ConnectionLimits | None = None,
    ) -> None:
        self.options = options
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._generic: tuple[Any, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._executor = ThreadPoolExecutor(_INFLATE_THREADS, "grpc-inflate")
        self._context = ServerContext(self._start_call, options.http2, limits)
        self._server: asyncio.Server | TlsListener | None = None

    @property
    def port(self) -> int:
        """The port listened on; the configured one before `start`."""
        if self._server is None:
            return self.options.port
        return int(self._server.sockets[0].getsockname()[1])

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register handlers of a service by method name; same signature as in `grpc.Server`."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        """Add generic handlers, which serve methods without a registered handler; as in `grpc.Server`."""
        self._generic += handlers

    async def start(self) -> None:
        """Listen. Raises `OSError`."""
        options = self.options
        if options.tls is not None:
            listener = TlsListener(
                lambda admission: Http2Connection(self._context, admission),
                self._context.limits,
                TlsOptions(options.tls, options.http2.handshake_timeout, _TLS_SHUTDOWN_TIMEOUT),
            )
            await listener.listen(options.host, options.port, options.backlog, options.reuse_port)
            self._server = listener
            return
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Http2Connection(self._context),
            options.host,
            options.port,
            backlog=options.backlog,
            reuse_address=True,
            reuse_port=options.reuse_port or None,
        )

    async def stop(self, grace: float) -> None:
        """Stop accepting calls, wait up to `grace` seconds for calls in flight, then abort the rest."""
        if self._server is None:
            return
        context, self._context.draining = self._context, True
        self._server.close()
        empty = asyncio.Event()
        context.on_empty = empty.set
        for connection in list(context.connections):
            connection.go_away()
        if context.connections:
            await _wait(empty, grace)
        for connection in list(context.connections):
            connection.abort()
        if context.connections:
            await _wait(empty, _CANCEL_TIMEOUT)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CANCEL_TIMEOUT)
        await self._server.wait_closed()
        self._server = None
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start_call(self, stream: Http2Stream, headers: Headers) -> StreamEvents:
        """Start the call of a new stream. Called by the HTTP/2 connections."""
        try:
            if headers.parsed is None:
                parsed = CallHeaders.parse(headers)
                headers.parsed = parsed, _rejection(parsed)
            call_headers, rejection = headers.parsed
            if rejection is not None:
                return _reject(stream, rejection)
            handler = None if self._interceptors else self._handlers.get(call_headers.path)
            if handler is None:
                handler = self._find_handler(call_headers)
        except ValueError as error:
            return _fail(stream, grpc.StatusCode.INTERNAL, str(error))
        except Exception as error:
            logger.exception("error in an interceptor")
            return _fail(stream, grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")
        if handler is None:
            return _fail(stream, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if isinstance(handler, CallbackHandler):
            return CallbackCall(stream, call_headers, self.options, handler.start, self._executor)
        return CoroutineCall(stream, call_headers, self.options, handler, self._tasks, self._executor)

    def _find_handler(self, headers: CallHeaders) -> Any:
        """Return the handler of a call's method after the interceptors, or None for an unknown method."""
        find: Callable[[Any], Awaitable[Any]] = self._look_up
        for interceptor in reversed(self._interceptors):
            find = _chain(interceptor, find)
        return _run_without_waiting(find(CallDetails(headers.path, headers.metadata)))

    async def _look_up(self, details: Any) -> Any:
        handler = self._handlers.get(details.method)
        if handler is not None:
            return handler
        found = (generic.service(details) for generic in self._generic)
        return next((handler for handler in found if handler is not None), None)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _chain(interceptor: Any, find: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    return lambda details: interceptor.intercept_service(find, details)


def _run_without_waiting(coroutine: Any) -> Any:
    """Return the result of a coroutine that must not suspend. Raises `RuntimeError` if it does."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("an interceptor must not wait")


def _rejection(headers: CallHeaders) -> bytes | None:
    """Return the header block that rejects an invalid call, or None if the call is valid."""
    if headers.method != "POST":
        return http_status(405)
    if not headers.is_grpc:
        return http_status(415)
    if headers.encoding not in ENCODINGS:
        message = f"grpc-encoding '{headers.encoding}' is not supported"
        return RESPONSE_HEADERS + status_trailers(grpc.StatusCode.UNIMPLEMENTED, message)
    return None


def _reject(stream: Http2Stream, block: bytes) -> StreamEvents:
    stream.send(None, b"", block)
    return NO_EVENTS


def _fail(stream: Http2Stream, code: grpc.StatusCode, message: str) -> StreamEvents:
    return _reject(stream, RESPONSE_HEADERS + status_trailers(code, message))
