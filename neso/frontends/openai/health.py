"""`/health`, `/ping`, `/version` and `/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response
from typing_extensions import TypedDict

import neso
from neso.frontends.openai.routing import TEXT, RequestContext, operation
from neso.server.metrics.registry import CONTENT_TYPE

if TYPE_CHECKING:
    from neso.server.core import Core


class Version(TypedDict):
    """The server's version."""

    version: str


class HealthApi:
    """State of the server."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @operation(
        "GET",
        "/health",
        "/health/ready",
        "/ping",
        tag="Health",
        errors=(503,),
        group="health",
        open_group="health",
    )
    async def ready(self, context: RequestContext) -> Response:
        """Check whether the server is ready to serve."""
        return Response(status_code=200 if self._core.ready() else 503)

    @operation("POST", "/ping", tag="Health", errors=(503,), group="health", open_group="health")
    async def ping(self, context: RequestContext) -> Response:
        """Check whether the server is ready to serve."""
        return await self.ready(context)

    @operation("GET", "/health/live", tag="Health", errors=(503,), group="health", open_group="health")
    async def live(self, context: RequestContext) -> Response:
        """Check whether the server is live."""
        return Response(status_code=200 if self._core.live() else 503)

    @operation("GET", "/version", tag="Health", response=Version, errors=(500,), group="health")
    async def version(self, context: RequestContext) -> Version:
        """Get the server's version."""
        return {"version": neso.__version__}

    @operation(
        "GET",
        "/metrics",
        tag="Health",
        response=TEXT,
        errors=(500,),
        group="metrics",
        open_group="metrics",
    )
    async def metrics(self, context: RequestContext) -> Response:
        """Get the metrics in Prometheus format."""
        return Response(await self._core.render_metrics(), headers={"content-type": CONTENT_TYPE})
