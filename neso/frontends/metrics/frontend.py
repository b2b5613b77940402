"""`GET /metrics`, in the text format of Prometheus."""

from __future__ import annotations

from neso.frontends.frontend_options import MetricsOptions
from neso.frontends.http import HttpServer, HttpServerOptions, Request, Response, Router
from neso.server.core import Core
from neso.server.metrics.text import CONTENT_TYPE


class MetricsHttp:
    """Serves a core's metrics; lives on the core's event loop."""

    def __init__(self, core: Core, options: MetricsOptions | None = None) -> None:
        self.options = options or MetricsOptions()
        self._core = core
        router = Router()
        router.add("GET", "/metrics", self._metrics)
        self._server = HttpServer(router, HttpServerOptions(self.options.host, self.options.port, max_body=0))

    @property
    def port(self) -> int:
        """The port listened on, which the system chose if the options say 0. Known once started."""
        return self._server.port

    @property
    def address(self) -> str:
        """host:port, for people."""
        return self._server.address

    async def start(self) -> None:
        """Listen. Raises `BindError`."""
        await self._server.start()

    async def stop(self, grace: float = 30.0) -> None:
        """Let responses in flight end within `grace` seconds, then close."""
        await self._server.stop(grace)

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._core.render_metrics(), 200, CONTENT_TYPE)
