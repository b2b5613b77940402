"""The routes of the Responses API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from neso.frontends.openai.connection import while_connected
from neso.frontends.openai.endpoint import GenerationEndpoint, error_response
from neso.frontends.openai.errors import to_api_error
from neso.frontends.openai.responses.api import ResponsesApi
from neso.frontends.openai.responses.schemas import ResponseRequest

if TYPE_CHECKING:
    from neso.server.core import Core


def response_routes(core: Core, api: ResponsesApi, max_body_size: int) -> list[Route]:
    """All of them."""

    async def retrieve(request: Request) -> Any:
        return api.retrieve(request.path_params["response_id"], request.query_params)

    async def delete(request: Request) -> Any:
        return await api.delete(request.path_params["response_id"])

    async def cancel(request: Request) -> Any:
        return await api.cancel(request.path_params["response_id"])

    async def input_items(request: Request) -> Any:
        return api.input_items(request.path_params["response_id"], request.query_params)

    create = GenerationEndpoint(core, ResponseRequest, api.create, max_body_size)
    count = GenerationEndpoint(core, ResponseRequest, api.count_input, max_body_size)
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/input_tokens", count, methods=["POST"]),
        Route(one, _Endpoint(retrieve), methods=["GET"]),
        Route(one, _Endpoint(delete), methods=["DELETE"]),
        Route(one + "/cancel", _Endpoint(cancel), methods=["POST"]),
        Route(one + "/input_items", _Endpoint(input_items), methods=["GET"]),
    ]


class _Endpoint:
    """An ASGI endpoint without a body; what it answers may be a stream."""

    def __init__(self, handle: Callable[[Request], Awaitable[Any]]) -> None:
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._handle(Request(scope, receive))
        except Exception as error:
            response = error_response(to_api_error(error))
        await while_connected(receive, response(scope, receive, send))
