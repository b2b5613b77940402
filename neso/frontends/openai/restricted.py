"""Routes that are answered only with the header that their group requires."""

from __future__ import annotations

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from neso.frontends.openai.endpoint import error_response
from neso.frontends.openai.errors import ApiError
from neso.frontends.restrictions import RequiredHeader


def restrict(routes: list[Route], required: RequiredHeader) -> list[Route]:
    """The same routes, for those who have the header; 403 for the others."""
    for route in routes:
        route.app = _restricted(route.app, required)
    return routes


def _restricted(app: ASGIApp, required: RequiredHeader) -> ASGIApp:
    name = required.name.encode()
    message = f"This API is restricted, expecting header '{required.name}'"

    async def restricted(scope: Scope, receive: Receive, send: Send) -> None:
        if required.matches(dict(scope["headers"]).get(name)):
            await app(scope, receive, send)
        else:
            await error_response(ApiError(403, message))(scope, receive, send)

    return restricted
