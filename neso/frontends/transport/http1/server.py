"""HTTP/1.1 server: options, listening socket, timeouts and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate

from neso.frontends.transport.http1.connection import HttpConnection
from neso.frontends.transport.http1.messages import Handler, error_body, response_head
from neso.frontends.transport.http1.parser import Rejection
from neso.frontends.transport.tcp import ConnectionLimits, Turn
from neso.frontends.transport.tls import TlsListener, TlsOptions

TURN = 0.005
"""Seconds in which the connections of a server read data before the event loop serves others."""


def _json_error(rejection: Rejection) -> tuple[int, bytes]:
    return rejection.status, error_body(rejection.message)


@dataclass(frozen=True, slots=True)
class HttpServerOptions:
    """Sizes are in bytes, times in seconds. Port 0 selects a free port, see `HttpServer.port`.

    `header_timeout`: from the first byte of a request to the end of its headers. `body_timeout`: longest pause within a
    body, and the time in which it may be slower than `MIN_BODY_RATE`. `write_timeout`: see `WriteProgress`. `linger`:
    how long a rejected client may continue to send, so that it can read the error. `rejection`: returns status and
    JSON body of an error raised before the handler runs. `tls`: PEM files to serve HTTPS; the handshake is limited by
    `header_timeout`. `reuse_port`: share the port with other processes.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_body: int = 64 << 20
    max_head: int = 64 << 10
    max_pipelined: int = 16
    write_buffer: int = 256 << 10
    keep_alive_timeout: float = 75.0
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    linger: float = 2.0
    backlog: int = 2048
    reuse_port: bool = False
    tls: ssl.SSLContext | None = None
    rejection: Callable[[Rejection], tuple[int, bytes]] = _json_error

    @property
    def tick(self) -> float:
        """Interval of the timeout checks. One timer serves all connections."""
        shortest = min(
            self.keep_alive_timeout, self.header_timeout, self.body_timeout, self.write_timeout, self.linger
        )
        return min(1.0, max(0.01, shortest / 4))


class ServerContext:
    """State shared by the connections of one server.

    `now` (monotonic seconds) and `date` (text of the Date header) are updated by `tick`, so reading them costs no
    system call.
    """

    def __init__(
        self,
        handler: Handler,
        options: HttpServerOptions,
        limits: ConnectionLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.handler = handler
        self.options = options
        self.limits = limits
        self.loop = loop
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        self.turn = Turn(loop, TURN)
        self.idle = asyncio.Event()  # set when the last connection closes while draining
        self._second = 0
        self._heads: dict[tuple[int, str | None], bytes] = {}
        self.tick()

    def tick(self) -> None:
        """Update the clock and drop the cached heads, which contain the old date."""
        self.now = time.monotonic()
        second = int(time.time())
        if second != self._second:
            self._second = second
            self.date = formatdate(second, usegmt=True)
        self._heads.clear()

    def cached_head(self, status: int, content_type: str | None) -> bytes:
        """Return the head of a response without extra headers, up to the value of Content-Length."""
        head = self._heads.get((status, content_type))
        if head is None:
            whole = response_head(status, content_type, (("content-length", ""),), None, self.date, "")
            head = self._heads[status, content_type] = whole.removesuffix(b"\r\n\r\n")
        return head


class BindError(OSError):
    """The server cannot listen on its address; the message names the address and the reason."""


class HttpServer:
    """Serves a handler over HTTP/1.1 on the running event loop. `limits`: on connections, may be shared by servers."""

    def __init__(
        self, handler: Handler, options: HttpServerOptions, limits: ConnectionLimits | None = None
    ) -> None:
        self._handler = handler
        self.options = options
        self._limits = limits or ConnectionLimits()
        self._server: asyncio.Server | TlsListener | None = None
        self._context: ServerContext | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port listened on; the configured one before `start`."""
        if self._server is None:
            return self.options.port
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """`host:port`, with an IPv6 host in brackets."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"{host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises `BindError`."""
        loop = asyncio.get_running_loop()
        context = ServerContext(self._handler, self.options, self._limits, loop)
        try:
            self._server = await self._listen(context)
        except (OSError, OverflowError) as error:
            raise BindError(self._bind_message(error)) from error
        self._context = context
        self._tick()

    async def _listen(self, context: ServerContext) -> asyncio.Server | TlsListener:
        options = self.options
        if options.tls is not None:
            listener = TlsListener(
                lambda admission: HttpConnection(context, admission),
                self._limits,
                TlsOptions(options.tls, options.header_timeout, options.linger),
            )
            await listener.listen(options.host, options.port, options.backlog, options.reuse_port)
            return listener
        return await context.loop.create_server(
            lambda: HttpConnection(context),
            options.host,
            options.port,
            backlog=options.backlog,
            reuse_address=True,
            reuse_port=options.reuse_port,
        )

    async def stop(self, grace: float = 30.0) -> None:
        """Stop accepting requests, wait up to `grace` seconds for requests in flight, then abort the rest."""
        if self._server is None or self._context is None:
            return
        context = self._context
        self._server.close()
        context.draining = True
        for connection in list(context.connections):
            connection.drain_and_close()
        deadline = context.loop.time() + grace
        if context.connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(context.idle.wait(), grace)
        if context.tasks:
            await asyncio.wait(context.tasks, timeout=max(0.0, deadline - context.loop.time()))
        for connection in list(context.connections):
            connection.abort()
        for task in context.tasks:
            task.cancel()
        await asyncio.gather(*context.tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        await self._server.wait_closed()
        self._server = None

    def _tick(self) -> None:
        """Update the clock and check the timeouts of all connections."""
        assert self._context is not None
        context = self._context
        context.tick()
        now = context.now
        for connection in list(context.connections):
            connection.check_timeout(now)
        self._timer = context.loop.call_later(self.options.tick, self._tick)

    def _bind_message(self, error: OSError | OverflowError) -> str:
        if isinstance(error, OSError):
            if error.errno == errno.EADDRINUSE:
                return f"cannot listen on {self.address}: the port is in use"
            if error.errno == errno.EACCES:
                return (
                    f"cannot listen on {self.address}: permission denied (ports below 1024 need privileges)"
                )
            if isinstance(error, socket.gaierror):
                return f"cannot listen on {self.address}: the host name is unknown"
        return f"cannot listen on {self.address}: {error}"
