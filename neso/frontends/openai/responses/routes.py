"""The routes of the Responses API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from neso.frontends.openai.access.authentication import key_of
from neso.frontends.openai.connection import while_connected
from neso.frontends.openai.endpoint import GenerationEndpoint, error_response
from neso.frontends.openai.errors import to_api_error
from neso.frontends.openai.responses.api import OWNER, ResponsesApi
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

    def route(path: str, endpoint: ASGIApp, method: str) -> Route:
        return Route(path, _Owned(endpoint), methods=[method])

    create = GenerationEndpoint(core, ResponseRequest, api.create, max_body_size)
    count = GenerationEndpoint(core, ResponseRequest, api.count_input, max_body_size)
    one = "/v1/responses/{response_id}"
    return [
        route("/v1/responses", create, "POST"),
        route("/v1/responses/input_tokens", count, "POST"),
        route(one, _Endpoint(retrieve), "GET"),
        route(one, _Endpoint(delete), "DELETE"),
        route(one + "/cancel", _Endpoint(cancel), "POST"),
        route(one + "/input_items", _Endpoint(input_items), "GET"),
    ]


class _Owned:
    """An ASGI endpoint that knows whose request it serves."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = key_of(scope)
        token = OWNER.set("" if key is None else key.owner)
        try:
            await self._app(scope, receive, send)
        finally:
            OWNER.reset(token)


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
