"""The listening side of the gRPC server, and which handler answers which method."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import grpc

from neso.frontends.grpc import status
from neso.frontends.grpc.call import logger
from neso.frontends.grpc.deferred import DeferredCall, DeferredHandler
from neso.frontends.grpc.messages import ENCODINGS
from neso.frontends.grpc.metadata import CallHeaders
from neso.frontends.grpc.options import GrpcServerOptions
from neso.frontends.grpc.task_call import TaskCall
from neso.frontends.http2 import Http2Connection, Http2Stream, Shared, StreamEvents
from neso.frontends.http2.headers import Headers
from neso.frontends.tls import listening_arguments

# Seconds that a client has for TLS before and after the calls.
_HANDSHAKE_TIMEOUT, _SHUTDOWN_TIMEOUT = 20.0, 2.0
_LAST_MOMENT = 5.0  # seconds for handlers to do what they do when they are cancelled


class CallDetails(NamedTuple):
    """What an interceptor is told; a `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: Any


class GrpcServer:
    """Serves method handlers of `grpc` (made by `grpc.unary_unary_rpc_method_handler` and its like, of coroutines), and
    `DeferredHandler`s.

    `interceptors` are objects with the `intercept_service` of `grpc.aio.ServerInterceptor`; they must answer without
    waiting. Lives on the running event loop.
    """

    def __init__(self, options: GrpcServerOptions, interceptors: tuple[Any, ...] = ()) -> None:
        self.options = options
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._generic: tuple[Any, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._shared = Shared(self._accept, options.http2)
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port listened on. Known once started."""
        if self._server is None:
            return self.options.port
        return int(self._server.sockets[0].getsockname()[1])

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Let these answer the methods of a service. The name is that of `grpc.Server`, whose place this takes."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        """Let these be asked for the methods that no registered handler answers, as generated code has it."""
        self._generic += handlers

    async def start(self) -> None:
        """Listen. Raises `OSError`."""
        options = self.options
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Http2Connection(self._shared),
            options.host,
            options.port,
            backlog=options.backlog,
            reuse_address=True,
            reuse_port=options.reuse_port or None,
            **listening_arguments(options.tls, _HANDSHAKE_TIMEOUT, _SHUTDOWN_TIMEOUT),
        )

    async def stop(self, grace: float) -> None:
        """Take no more calls, let those in flight end within `grace` seconds, then cut off the rest."""
        if self._server is None:
            return
        shared, self._shared.draining = self._shared, True
        self._server.close()
        empty = asyncio.Event()
        shared.on_empty = empty.set
        for connection in list(shared.connections):
            connection.go_away()
        if shared.connections:
            await _wait(empty, grace)
        for connection in list(shared.connections):
            connection.abort()
        if shared.connections:
            await _wait(empty, _LAST_MOMENT)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_MOMENT)
        await self._server.wait_closed()
        self._server = None

    def _accept(self, stream: Http2Stream, headers: Headers) -> StreamEvents:
        """A call begins."""
        try:
            call_headers = headers.made
            if call_headers is None:
                call_headers = headers.made = CallHeaders.parse(headers)
            if (refusal := _refusal(call_headers)) is not None:
                return _refuse(stream, refusal)
            handler = self._find(call_headers)
        except ValueError as error:
            return _fail(stream, grpc.StatusCode.INTERNAL, str(error))
        except Exception as error:
            logger.exception("error in an interceptor")
            return _fail(stream, grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")
        if handler is None:
            return _fail(stream, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if isinstance(handler, DeferredHandler):
            return DeferredCall(stream, call_headers, self.options, handler.start)
        return TaskCall(stream, call_headers, self.options, handler, self._tasks)

    def _find(self, headers: CallHeaders) -> Any:
        if not self._interceptors and (handler := self._handlers.get(headers.path)) is not None:
            return handler
        find: Callable[[Any], Awaitable[Any]] = self._look_up
        for interceptor in reversed(self._interceptors):
            find = _chain(interceptor, find)
        return _result_now(find(CallDetails(headers.path, headers.metadata)))

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


def _result_now(coroutine: Any) -> Any:
    """The result of a coroutine that does not wait."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("an interceptor must not wait")


class _Refused:
    """The events of a stream that was answered at once."""

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_reset(self) -> None: ...


def _refusal(headers: CallHeaders) -> bytes | None:
    """The header block that answers what is no call, None for a call."""
    if headers.method != "POST":
        return status.http_status(405)
    if not headers.is_grpc:
        return status.http_status(415)
    if headers.encoding not in ENCODINGS:
        message = f"grpc-encoding '{headers.encoding}' is not supported"
        return status.HEAD + status.trailers(grpc.StatusCode.UNIMPLEMENTED, message)
    return None


def _refuse(stream: Http2Stream, block: bytes) -> StreamEvents:
    stream.send(None, b"", block)
    return _Refused()


def _fail(stream: Http2Stream, code: grpc.StatusCode, message: str) -> StreamEvents:
    return _refuse(stream, status.HEAD + status.trailers(code, message))
