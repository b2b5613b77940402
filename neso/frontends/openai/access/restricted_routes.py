"""Routes that are answered only with the header that their group requires."""

from __future__ import annotations

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from neso.frontends.openai.endpoint import error_response
from neso.frontends.openai.errors import ApiError
from neso.frontends.openai_options import OpenAIOptions
from neso.frontends.restrictions import RequiredHeader


def restrict(routes: list[Route], group: str, options: OpenAIOptions) -> list[Route]:
    """The same routes, for those who have the headers that this API and that the whole of HTTP ask for."""
    for restrictions, refusal in (
        (options.restrictions, _forbidden),
        (options.openai_restrictions, _unauthorized),
    ):
        required = restrictions.get(group)
        if required is not None:
            for route in routes:
                route.app = _restricted(route.app, required, refusal(required))
    return routes


def _restricted(app: ASGIApp, required: RequiredHeader, refusal: ApiError) -> ASGIApp:
    name = required.name.encode()

    async def restricted(scope: Scope, receive: Receive, send: Send) -> None:
        if required.matches(dict(scope["headers"]).get(name)):
            await app(scope, receive, send)
        else:
            await error_response(refusal)(scope, receive, send)

    return restricted


def _forbidden(required: RequiredHeader) -> ApiError:
    """As the KServe front end says it."""
    return ApiError(403, f"This API is restricted, expecting header '{required.name}'")


def _unauthorized(required: RequiredHeader) -> ApiError:
    """As Triton's front end for OpenAI's API says it."""
    return ApiError(
        401,
        f"This API is restricted, expecting header '{required.name}' with valid value",
        type="authentication_error",
        code="invalid_auth",
    )
