"""Prometheus metrics over HTTP: `GET /metrics`."""

from __future__ import annotations

from neso.frontends.frontend_options import MetricsOptions
from neso.frontends.transport.http1 import HttpServer, HttpServerOptions, Request, Response, Router
from neso.frontends.transport.tcp import ConnectionLimits
from neso.server.core import Core
from neso.server.metrics.registry import CONTENT_TYPE


class MetricsHttp:
    """Serves the metrics of a server on its event loop."""

    def __init__(
        self, core: Core, options: MetricsOptions | None = None, limits: ConnectionLimits | None = None
    ) -> None:
        self.options = options or MetricsOptions()
        self._core = core
        router = Router()
        router.add("GET", "/metrics", self._metrics)
        server_options = HttpServerOptions(self.options.host, self.options.port, max_body=0)
        self._server = HttpServer(router, server_options, limits)

    @property
    def port(self) -> int:
        """The port listened on; the configured one before `start`."""
        return self._server.port

    @property
    def address(self) -> str:
        """`host:port`."""
        return self._server.address

    async def start(self) -> None:
        """Listen. Raises `BindError`."""
        await self._server.start()

    async def stop(self, grace: float = 30.0) -> None:
        """Wait up to `grace` seconds for requests in flight, then close."""
        await self._server.stop(grace)

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._core.render_metrics(), 200, CONTENT_TYPE)
