"""The listening side of the HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket

from neso.frontends.http.connection import HttpConnection
from neso.frontends.http.handler import Handler
from neso.frontends.http.options import HttpServerOptions
from neso.frontends.http.shared import Shared
from neso.frontends.tls import listening_arguments


class BindError(OSError):
    """The address cannot be listened on; the message says which and why."""


class HttpServer:
    """Serves a handler over HTTP/1.1 on the running event loop."""

    def __init__(self, handler: Handler, options: HttpServerOptions) -> None:
        self._handler = handler
        self.options = options
        self._server: asyncio.Server | None = None
        self._shared: Shared | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port listened on, which the system chose if the options say 0. Known once started."""
        if self._server is None:
            return self.options.port
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """host:port, for people."""
        host = f"[{self.options.host}]" if ":" in self.options.host else self.options.host
        return f"{host}:{self.port}"

    async def start(self) -> None:
        """Listen. Raises `BindError`."""
        loop = asyncio.get_running_loop()
        shared = Shared(self._handler, self.options, loop)
        try:
            self._server = await loop.create_server(
                lambda: HttpConnection(shared),
                self.options.host,
                self.options.port,
                backlog=self.options.backlog,
                reuse_address=True,
                reuse_port=self.options.reuse_port,
                **listening_arguments(self.options.tls, self.options.header_timeout, self.options.linger),
            )
        except (OSError, OverflowError) as error:
            raise BindError(self._bind_message(error)) from error
        self._shared = shared
        self._sweep()

    async def stop(self, grace: float = 30.0) -> None:
        """Take no more connections and requests, let those in flight end within `grace`, cut off the rest."""
        if self._server is None or self._shared is None:
            return
        shared = self._shared
        self._server.close()
        shared.draining = True
        for connection in list(shared.connections):
            connection.drain_and_close()
        deadline = shared.loop.time() + grace
        if shared.connections:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(shared.idle.wait(), grace)
        if shared.tasks:
            await asyncio.wait(shared.tasks, timeout=max(0.0, deadline - shared.loop.time()))
        for connection in list(shared.connections):
            connection.abort()
        for task in shared.tasks:
            task.cancel()
        await asyncio.gather(*shared.tasks, return_exceptions=True)
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._server.wait_closed()
        self._server = None

    def _sweep(self) -> None:
        """Advance the clock and look at every connection's timeout: no timer per connection, one for all."""
        assert self._shared is not None
        shared = self._shared
        shared.tick()
        now = shared.clock.now
        for connection in list(shared.connections):
            connection.check_timeout(now)
        self._sweeper = shared.loop.call_later(self.options.tick, self._sweep)

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
