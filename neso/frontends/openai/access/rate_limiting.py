"""Refuses requests of those who ask too much."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neso.frontends.openai.access.authentication import key_of
from neso.frontends.openai.access.standing import Standing, duration
from neso.frontends.openai.access.token_meter import TOKENS_USED
from neso.frontends.openai.endpoint import error_response
from neso.frontends.openai.errors import ApiError
from neso.frontends.openai_options import Quota

if TYPE_CHECKING:
    from neso.frontends.openai.access.quotas import Quotas


class RateLimiting:
    """429 for POST requests beyond the quota of their key; without keys, of their address.

    Every response to such a request tells how its client stands, in the headers that OpenAI has for it.
    """

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._quotas = _make_quotas() if quota else None

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application for those who do not ask too much; of all that it is around, together."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(app, scope, receive, send)

        return limited

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        key = key_of(scope)
        quota = self._quota if key is None else key.quota(self._quota)
        if scope["method"] != "POST" or not quota:
            await app(scope, receive, send)
            return
        client = f"key {key.owner}" if key is not None else f"address {(scope.get('client') or ('',))[0]}"
        if self._quotas is None:
            self._quotas = _make_quotas()
        quotas = self._quotas
        standings, refused = await quotas.take(client, quota)
        headers = list(_headers(standings))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        if refused is not None:
            headers.append((b"retry-after", str(max(math.ceil(refused.reset), 1)).encode()))
            await error_response(_error(refused))(scope, receive, send_with_headers)
            return
        token = TOKENS_USED.set(lambda tokens: quotas.charge(client, quota, tokens))
        try:
            await app(scope, receive, send_with_headers)
        finally:
            TOKENS_USED.reset(token)


def _make_quotas() -> Quotas:
    """The library takes a moment to import: where there are limits at the start, no request waits for it."""
    from neso.frontends.openai.access.quotas import Quotas

    return Quotas()


def _headers(standings: Iterable[Standing]) -> Iterable[tuple[bytes, bytes]]:
    for standing in standings:
        for name, value in (
            ("limit", str(standing.limit)),
            ("remaining", str(standing.remaining)),
            ("reset", duration(standing.reset)),
        ):
            yield f"x-ratelimit-{name}-{standing.what}".encode(), value.encode()


def _error(standing: Standing) -> ApiError:
    unit = "RPM" if standing.what == "requests" else "TPM"
    return ApiError(
        429,
        f"Rate limit reached for {standing.what} per minute ({unit}): limit {standing.limit}. "
        f"Please try again in {duration(standing.reset)}.",
        type=standing.what,
        code="rate_limit_exceeded",
    )
