"""Adapter that serves an ASGI 3 application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from neso.frontends.transport.http1.messages import HandlerResult, Request, Response, StreamingResponse
from neso.frontends.transport.http1.server import HttpServer, HttpServerOptions
from neso.frontends.transport.tcp import ConnectionLimits

Message = MutableMapping[str, Any]
AsgiCallable = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]

logger = logging.getLogger(__name__)

# Headers that the server writes.
_HOP_HEADERS = frozenset({b"connection", b"transfer-encoding", b"date"})


class AsgiApp:
    """Wraps an ASGI application as a handler. Can be mounted on a router; the path is not rewritten.

    When the client disconnects, the application receives `http.disconnect` and its task is cancelled. `startup` and
    `shutdown` run the lifespan; if several servers share the application, only the first startup and the last
    shutdown take effect.
    """

    def __init__(self, app: AsgiCallable) -> None:
        self._app = app
        self._users = 0
        self._lifespan: _Lifespan | None = None

    async def startup(self) -> None:
        """Run the application's startup. Raises `RuntimeError` if it fails."""
        self._users += 1
        if self._users == 1:
            self._lifespan = _Lifespan(self._app)
            await self._lifespan.startup()

    async def shutdown(self) -> None:
        """Run the application's shutdown."""
        self._users -= 1
        if self._users == 0 and self._lifespan is not None:
            await self._lifespan.shutdown()

    async def __call__(self, request: Request) -> HandlerResult:
        state = {} if self._lifespan is None else self._lifespan.state
        exchange = _Exchange(request)
        await self._app(_scope(request, state), exchange.receive, exchange.send)
        return exchange.result()


class AsgiServer(HttpServer):
    """An HTTP server of an ASGI application, with its lifespan."""

    def __init__(
        self,
        app: AsgiApp | AsgiCallable,
        options: HttpServerOptions,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._app = app if isinstance(app, AsgiApp) else AsgiApp(app)
        super().__init__(self._app, options, limits)

    async def start(self) -> None:
        await self._app.startup()
        try:
            await super().start()
        except OSError:
            await self._app.shutdown()
            raise

    async def stop(self, grace: float = 30.0) -> None:
        await super().stop(grace)
        await self._app.shutdown()


class _Exchange:
    """The `receive` and `send` callables of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._body_received = False
        self._start: Message | None = None
        self._stream: StreamingResponse | None = None
        self._complete = asyncio.Event()

    async def receive(self) -> Message:
        if not self._body_received:
            self._body_received = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        if not self._complete.is_set():
            await _wait_first(self._complete.wait(), self._request.connection.wait_disconnected())
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if self._start is not None:
                raise RuntimeError("http.response.start was sent twice")
            self._start = message
            return
        if message["type"] != "http.response.body":
            raise RuntimeError(f"unexpected ASGI message {message['type']!r}")
        if self._start is None:
            raise RuntimeError("http.response.body was sent before http.response.start")
        if self._complete.is_set():
            raise RuntimeError("http.response.body was sent after the end of the body")
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._stream is None and not more and self._request.method != "HEAD":
            self._complete.set()
            headers, _ = self._headers()
            response = Response(body, self._start["status"], None, headers)
            self._request.connection.send(self._request, response)
            return
        if self._stream is None:
            headers, length = self._headers()
            self._stream = StreamingResponse(self._request, self._start["status"], None, headers, length)
        self._stream.write(bytes(body))
        if more:
            await self._stream.drain()
        else:
            self._complete.set()
            self._stream.finish()

    def result(self) -> HandlerResult:
        """Return the result after the application has returned. Raises `RuntimeError` for an incomplete response."""
        if self._stream is not None and not self._complete.is_set():
            raise RuntimeError("the application ended without ending its response")
        return None

    def _headers(self) -> tuple[list[tuple[str, str]], int | None]:
        """Return the application's headers except Content-Length, and the value of Content-Length."""
        assert self._start is not None
        headers: list[tuple[str, str]] = []
        length: int | None = None
        for name, value in self._start.get("headers", ()):
            lower = name.lower()
            if lower == b"content-length":
                length = int(value)
            elif lower not in _HOP_HEADERS:
                headers.append((name.decode("latin-1"), value.decode("latin-1")))
        return headers, length


class _Lifespan:
    """Runs the lifespan protocol in one task."""

    def __init__(self, app: AsgiCallable) -> None:
        self.state: dict[str, Any] = {}
        self._app = app
        self._task: asyncio.Task[None] | None = None
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()

    async def startup(self) -> None:
        self._task = asyncio.create_task(self._run())
        await self._exchange("startup")

    async def shutdown(self) -> None:
        if self._task is not None and not self._task.done():
            await self._exchange("shutdown")
            await self._task

    async def _exchange(self, event: str) -> None:
        self._inbox.put_nowait({"type": f"lifespan.{event}"})
        reply = await self._outbox.get()
        if reply["type"] == f"lifespan.{event}.failed":
            raise RuntimeError(f"the application's {event} failed: {reply.get('message', '')}")

    async def _run(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": self.state}
        try:
            await self._app(scope, self._inbox.get, self._outbox.put)
        except Exception as error:
            # By the specification, this means that the application does not support the lifespan protocol.
            logger.debug("the application does not support the lifespan protocol: %r", error)
        finally:
            self._outbox.put_nowait({"type": "lifespan.ended"})


def _scope(request: Request, state: dict[str, Any]) -> dict[str, Any]:
    connection = request.connection
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": request.http_version,
        "method": request.method,
        "scheme": connection.scheme,
        "path": request.path,
        "raw_path": request.raw_path,
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers.items()),
        "client": connection.peer,
        "server": connection.local,
        "state": state.copy(),
        "extensions": {"neso.cancels_on_disconnect": {}},
    }


async def _wait_first(*waits: Awaitable[Any]) -> None:
    """Wait for the first of `waits` and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
