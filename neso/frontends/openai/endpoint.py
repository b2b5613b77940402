"""An ASGI endpoint that generates text: reads the request, answers, and stops when the client has gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neso.frontends.openai.connection import Body, ClientGone, parse_body, read_body, while_connected
from neso.frontends.openai.errors import ApiError, to_api_error


class GenerationEndpoint(Generic[Body]):
    """Hands the body, checked against `schema`, to `create`, whose result is an ASGI application."""

    def __init__(
        self, schema: type[Body], create: Callable[[Body], Awaitable[Any]], max_body_size: int
    ) -> None:
        self._schema = schema
        self._create = create
        self._max_body_size = max_body_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = parse_body(await read_body(scope, receive, self._max_body_size), self._schema)
        except ClientGone:
            return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        await while_connected(receive, self._answer(request, scope, receive, send))

    async def _answer(self, request: Body, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._create(request)
        except Exception as error:
            response = error_response(to_api_error(error))
        await response(scope, receive, send)


def error_response(error: ApiError) -> Response:
    """The error as a response."""
    return Response(error.body(), error.status, media_type="application/json")
