"""Lets those in who have an API key."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from neso.frontends.openai.access.api_keys import ApiKey, ApiKeys
from neso.frontends.openai.endpoint import error_response
from neso.frontends.openai.errors import ApiError
from neso.frontends.openai_options import OPEN_GROUPS

logger = logging.getLogger(__name__)

API_KEY = "neso.api_key"
"""Where the scope of a request has the `ApiKey` that it came with."""
_BEARER = b"bearer "


class Authentication:
    """ASGI middleware: 401 for requests without a key, but for the paths of the groups that are open."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_groups: tuple[str, ...]) -> None:
        self._app = app
        self._keys = keys
        self._open = tuple(path for group in open_groups for path in OPEN_GROUPS[group])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        secret = given_key(scope)
        key = None if secret is None else self._keys.find(secret)
        if key is None:
            client = (scope.get("client") or ("?",))[0]
            logger.info("refused %s %s of %s: no valid API key", scope["method"], scope["path"], client)
            await _refusal(missing=secret is None)(scope, receive, send)
            return
        scope[API_KEY] = key
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return any(path == own or path.startswith(f"{own}/") for own in self._open)


def key_of(scope: Scope) -> ApiKey | None:
    """The key that a request came with, None where none is asked for."""
    return scope.get(API_KEY)


def given_key(scope: Scope) -> bytes | None:
    """What a request has as its key: `Authorization: Bearer KEY`, or `x-api-key: KEY`."""
    other = None
    for name, value in scope["headers"]:
        if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            return bytes(value[len(_BEARER) :].strip())
        if name == b"x-api-key":
            other = bytes(value.strip())
    return other


def _refusal(*, missing: bool) -> ASGIApp:
    message = (
        "You didn't provide an API key. You need to provide it in an Authorization header using Bearer auth "
        "(i.e. Authorization: Bearer YOUR_KEY), or in a header x-api-key."
        if missing
        else "Incorrect API key provided."
    )
    response = error_response(ApiError(401, message, type="invalid_request_error", code="invalid_api_key"))
    response.headers["www-authenticate"] = "Bearer"
    return response
