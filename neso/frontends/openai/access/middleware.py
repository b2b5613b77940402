"""ASGI middleware of the OpenAI API: request ids, API keys, CORS, restricted routes and rate limits."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neso.frontends.openai.access.api_keys import ApiKeys, bearer_token, request_key, set_request_key
from neso.frontends.openai.errors import REQUEST_ID, ApiError
from neso.frontends.openai.routing import error_response
from neso.frontends.openai_options import OPEN_GROUPS, AccessOptions, OpenAIOptions
from neso.frontends.security import CROSS_SITE, RequiredHeader, is_cross_site

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from neso.server.core import Core

logger = logging.getLogger(__name__)

_REQUEST_ID_HEADER = b"x-request-id"
PUBLIC_FILES = "/static"
"""Path of the web pages' files, which are the same on every server. They and `/` never require a key."""
_VALID_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,512}")
_CORS_METHODS = ("GET", "POST", "DELETE")
_CORS_EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{name}-{unit}"
        for unit in ("requests", "tokens")
        for name in ("limit", "remaining", "reset")
    ),
)


def add_middleware(app: Starlette, options: AccessOptions) -> None:
    """Add request ids, and API keys and CORS if enabled. The middleware added last runs first."""
    if options.keys is not None:
        app.add_middleware(AuthenticationMiddleware, keys=options.keys, open_groups=options.open_groups)
    if options.origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.origins,
            allow_methods=_CORS_METHODS,
            allow_headers=("*",),
            expose_headers=_CORS_EXPOSED_HEADERS,
        )
    app.add_middleware(RequestIdMiddleware)


def limit_rates(routes: list[Route], core: Core, options: AccessOptions) -> list[Route]:
    """Add rate limits to `routes` if a default quota or API keys are configured."""
    if not options.quota and options.keys is None:  # a key may have its own quota
        return routes
    from neso.frontends.openai.access.rate_limits import RateLimitMiddleware, open_limiter

    middleware = RateLimitMiddleware(options.quota, open_limiter(core, options.quota))
    for route in routes:
        route.app = middleware.wrap(route.app)
    return routes


def restrict(routes: list[Route], group: str, options: OpenAIOptions) -> list[Route]:
    """Require the headers that `--http-restricted-api` and `--openai-restricted-api` set for `group`."""
    for restrictions, make_error in (
        (options.restrictions, _forbidden),
        (options.openai_restrictions, _unauthorized),
    ):
        required = restrictions.get(group)
        if required is not None:
            for route in routes:
                route.app = _require_header(route.app, required, make_error(required))
    return routes


def refuse_cross_site(routes: list[Route], origins: Sequence[str]) -> list[Route]:
    """Refuse requests that web pages of other sites make browsers send, except pages of `origins` ("*": any)."""
    for route in routes:
        route.app = _same_site_only(route.app, origins)
    return routes


def _same_site_only(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    error = ApiError(403, CROSS_SITE, type="invalid_request_error", code="cross_site_request")

    async def same_site(scope: Scope, receive: Receive, send: Send) -> None:
        if is_cross_site(Headers(scope=scope).get, origins):
            await error_response(error)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return same_site


class RequestIdMiddleware:
    """Sets `x-request-id` of the response to the request's header if it is valid, else to a new id.

    Logs one line per request at debug level.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = b""
        for name, value in scope["headers"]:
            if name == _REQUEST_ID_HEADER:
                request_id = value
                break
        if not _VALID_REQUEST_ID.fullmatch(request_id):
            request_id = b"req_" + uuid.uuid4().hex.encode()
        status = 0
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (_REQUEST_ID_HEADER, request_id)]
                message = {**message, "headers": headers}
            await send(message)

        token = REQUEST_ID.set(request_id.decode())
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            REQUEST_ID.reset(token)
            if logger.isEnabledFor(logging.DEBUG):
                _log_request(scope, status, time.perf_counter() - started, request_id.decode())


class AuthenticationMiddleware:
    """Rejects requests without a valid API key with status 401, except for the paths of `open_groups`.

    The key is available to handlers as `request_key(scope)`.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_groups: tuple[str, ...]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = (
            PUBLIC_FILES,
            *(path for group in open_groups for path in OPEN_GROUPS[group]),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        secret = bearer_token(scope)
        key = None if secret is None else self._keys.find(secret)
        if key is None and self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        if key is None:
            client = (scope.get("client") or ("?",))[0]
            logger.info("rejected %s %s from %s: no valid API key", scope["method"], scope["path"], client)
            await _missing_key(has_secret=secret is not None)(scope, receive, send)
            return
        set_request_key(scope, key)  # type: ignore[arg-type]
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path == "/" or any(path == own or path.startswith(f"{own}/") for own in self._open_paths)


def _missing_key(*, has_secret: bool) -> ASGIApp:
    message = (
        "Incorrect API key provided."
        if has_secret
        else "You didn't provide an API key. You need to provide it in an Authorization header using Bearer auth "
        "(i.e. Authorization: Bearer YOUR_KEY), or in a header x-api-key."
    )
    response = error_response(ApiError(401, message, type="invalid_request_error", code="invalid_api_key"))
    response.headers["www-authenticate"] = "Bearer"
    return response


def _require_header(app: ASGIApp, required: RequiredHeader, error: ApiError) -> ASGIApp:
    name = required.name.encode()

    async def restricted(scope: Scope, receive: Receive, send: Send) -> None:
        if required.matches(dict(scope["headers"]).get(name)):
            await app(scope, receive, send)
        else:
            await error_response(error)(scope, receive, send)

    return restricted


def _forbidden(required: RequiredHeader) -> ApiError:
    """Return the same status and message as the KServe HTTP port."""
    return ApiError(403, f"This API is restricted, expecting header '{required.name}'")


def _unauthorized(required: RequiredHeader) -> ApiError:
    """Return the same error as Triton's OpenAI frontend."""
    return ApiError(
        401,
        f"This API is restricted, expecting header '{required.name}' with valid value",
        type="authentication_error",
        code="invalid_auth",
    )


def _log_request(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    key = request_key(scope)
    logger.debug(
        "%s %s: %s in %.3f s%s, request %s",
        *(scope["method"], scope["path"], status or "no response", seconds),
        *("" if key is None else f", key '{key.name}'", request_id),
        extra={"request_id": request_id},
    )
