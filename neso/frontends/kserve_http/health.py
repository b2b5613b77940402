"""Health endpoints: 200, or 400 while not ready."""

from __future__ import annotations

from neso.frontends.transport.http1 import Request, Response, error_response
from neso.server.core import Core


class HealthEndpoints:
    """`GET /v2/health/live`, `/v2/health/ready` and `/v2/models/{model}[/versions/{version}]/ready`."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def live(self, request: Request) -> Response:
        return _empty(self._core.live())

    def ready(self, request: Request) -> Response:
        return _empty(self._core.ready())

    async def model_ready(self, request: Request) -> Response:
        ready = await self._core.check_model_ready(request.params["model"], request.params.get("version", ""))
        return _empty(True) if ready else error_response(400, "Model version not ready")


def _empty(good: bool) -> Response:
    return Response(b"", 200 if good else 400, None)
