"""Routes for those who run the server: loading models, metrics."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from neso.frontends.openai.endpoint import answer_to_body
from neso.frontends.openai.models.control import LoadModelRequest, ModelControlApi, UnloadModelRequest
from neso.server.metrics.text import CONTENT_TYPE

if TYPE_CHECKING:
    from neso.server.core import Core


def control_routes(core: Core, max_body_size: int) -> list[Route]:
    """`POST /v1/models/{model}/load` and `/unload`."""
    api = ModelControlApi(core, created=int(time.time()))

    async def load(request: Request) -> Response:
        change = partial(api.load, request.path_params["model"])
        return await answer_to_body(request, LoadModelRequest, change, max_body_size, empty=b"{}")

    async def unload(request: Request) -> Response:
        change = partial(api.unload, request.path_params["model"])
        return await answer_to_body(request, UnloadModelRequest, change, max_body_size, empty=b"{}")

    return [
        Route("/v1/models/{model:path}/load", load, methods=["POST"]),
        Route("/v1/models/{model:path}/unload", unload, methods=["POST"]),
    ]


def metrics_route(core: Core) -> Route:
    """`GET /metrics`, as on the port of the metrics."""

    async def metrics(request: Request) -> Response:
        return Response(await core.render_metrics(), headers={"content-type": CONTENT_TYPE})

    return Route("/metrics", metrics, methods=["GET"])
