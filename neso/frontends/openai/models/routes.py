"""Routes for those who run the server: loading models, metrics."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from neso.frontends.openai.connection import Body, ClientGone, parse_body, read_body
from neso.frontends.openai.endpoint import error_response
from neso.frontends.openai.errors import to_api_error
from neso.frontends.openai.models.control import LoadModelRequest, ModelControlApi, UnloadModelRequest
from neso.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from neso.server.core import Core


def control_routes(core: Core, max_body_size: int) -> list[Route]:
    """`POST /v1/models/{model}/load` and `/unload`."""
    api = ModelControlApi(core, created=int(time.time()))

    async def load(request: Request) -> Response:
        return await _change(request, LoadModelRequest, api.load, max_body_size)

    async def unload(request: Request) -> Response:
        return await _change(request, UnloadModelRequest, api.unload, max_body_size)

    return [
        Route("/v1/models/{model:path}/load", load, methods=["POST"]),
        Route("/v1/models/{model:path}/unload", unload, methods=["POST"]),
    ]


def metrics_route(core: Core) -> Route:
    """`GET /metrics`, as on the port of the metrics."""

    async def metrics(request: Request) -> Response:
        return Response(await core.render_metrics(), headers={"content-type": CONTENT_TYPE})

    return Route("/metrics", metrics, methods=["GET"])


async def _change(
    request: Request,
    schema: type[Body],
    change: Callable[[str, Body], Awaitable[dict[str, Any]]],
    limit: int,
) -> Response:
    """Do what a body asks for; one that is empty asks for nothing special."""
    try:
        body = parse_body(await read_body(request.scope, request.receive, limit) or b"{}", schema)
        answer = await change(request.path_params["model"], body)
        return Response(orjson.dumps(answer), media_type="application/json")
    except ClientGone:
        return Response()
    except Exception as error:
        return error_response(to_api_error(error))
