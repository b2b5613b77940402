"""Rate limits: requests and tokens per minute, per API key or per client address."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neso.frontends.openai.access.api_keys import request_key
from neso.frontends.openai.errors import ApiError
from neso.frontends.openai.routing import error_response
from neso.frontends.openai_options import Quota
from neso.generation import GenerationOutput, Usage
from neso.server.processes.front_end_core import FrontEndCore

if TYPE_CHECKING:
    from neso.server.core import Core

TOKENS_USED: ContextVar[Callable[[int], None] | None] = ContextVar("tokens_used", default=None)
"""Callback that counts tokens against the current request's rate limit; None if it has no limit."""


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """State of one limit of a client. `unit`: requests or tokens. `reset`: seconds until the window is empty."""

    unit: str
    limit: int
    remaining: int
    reset: float


class RateLimiter:
    """Counts requests and tokens of clients over sliding windows of a minute, in process memory."""

    def __init__(self) -> None:
        self._pending: set[asyncio.Task[None]] = set()

    def prepare(self) -> None:
        """Import the library, which is slow: most servers have no limits, and no request should wait for it."""
        assert self._windows

    @cached_property
    def _windows(self) -> Any:
        from limits.aio.storage import MemoryStorage
        from limits.aio.strategies import SlidingWindowCounterRateLimiter

        return SlidingWindowCounterRateLimiter(MemoryStorage())

    @staticmethod
    def _per_minute(amount: int) -> Any:
        from limits import RateLimitItemPerMinute

        return RateLimitItemPerMinute(amount)

    async def count_request(
        self, client: str, quota: Quota
    ) -> tuple[list[RateLimitStatus], RateLimitStatus | None]:
        """Count a request of `client`. Returns the state of its limits, and the exceeded limit or None."""
        statuses: list[RateLimitStatus] = []
        exceeded = None
        if quota.tokens:
            tokens = await self._status("tokens", client, quota.tokens)
            statuses.append(tokens)
            exceeded = None if tokens.remaining else tokens
        if quota.requests:
            limit = self._per_minute(quota.requests)
            counted = exceeded is None and await self._windows.hit(limit, "requests", client)
            requests = await self._status("requests", client, quota.requests)
            statuses.append(requests)
            if exceeded is None and not counted:
                exceeded = requests
        return statuses, exceeded

    def count_tokens(self, client: str, quota: Quota, tokens: int) -> None:
        """Count the tokens that a finished request used. Tokens beyond the limit are not carried over."""
        if quota.tokens and tokens:
            task = asyncio.ensure_future(self._count_tokens(client, quota.tokens, tokens))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def _count_tokens(self, client: str, limit: int, tokens: int) -> None:
        remaining = (await self._status("tokens", client, limit)).remaining
        if remaining:
            cost = min(tokens, remaining)
            await self._windows.hit(self._per_minute(limit), "tokens", client, cost=cost)

    async def _status(self, unit: str, client: str, limit: int) -> RateLimitStatus:
        stats = await self._windows.get_window_stats(self._per_minute(limit), unit, client)
        return RateLimitStatus(unit, limit, stats.remaining, max(stats.reset_time - time.time(), 0.0))


class MainProcessLimiter:
    """The rate limiter of the main process, which counts for all server processes."""

    def __init__(self, core: FrontEndCore) -> None:
        self._core = core

    async def count_request(
        self, client: str, quota: Quota
    ) -> tuple[list[RateLimitStatus], RateLimitStatus | None]:
        """See `RateLimiter`."""
        statuses, exceeded = await self._core.channel.call("count_request", client, quota)
        return statuses, exceeded

    def count_tokens(self, client: str, quota: Quota, tokens: int) -> None:
        """See `RateLimiter`."""
        self._core.channel.notify("count_tokens", client, quota, tokens)


def open_limiter(core: Core, quota: Quota) -> RateLimiter | MainProcessLimiter:
    """Return the rate limiter of a server. `quota`: the default quota."""
    if isinstance(core, FrontEndCore):
        return MainProcessLimiter(core)
    limiter = RateLimiter()
    if quota:
        limiter.prepare()
    core.operations |= {"count_request": limiter.count_request, "count_tokens": limiter.count_tokens}
    return limiter


class RateLimitMiddleware:
    """Rejects POST requests over the quota of the API key (without keys: of the client address) with status 429.

    Every response to a limited request has OpenAI's `x-ratelimit-*` headers. Wrap each route with `wrap`; all
    routes share the limits.
    """

    def __init__(self, quota: Quota, limiter: RateLimiter | MainProcessLimiter) -> None:
        self._quota = quota
        self._limiter = limiter

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Return `app` with rate limits."""

        async def limited(scope: Scope, receive: Receive, send: Send) -> None:
            await self._serve(app, scope, receive, send)

        return limited

    async def _serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        key = request_key(scope)
        quota = self._quota if key is None else key.quota(self._quota)
        if scope["method"] != "POST" or not quota:
            await app(scope, receive, send)
            return
        client = f"key {key.owner}" if key is not None else f"address {(scope.get('client') or ('',))[0]}"
        limiter = self._limiter
        statuses, exceeded = await limiter.count_request(client, quota)
        headers = list(_headers(statuses))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            await send(message)

        if exceeded is not None:
            headers.append((b"retry-after", str(max(math.ceil(exceeded.reset), 1)).encode()))
            await error_response(_error(exceeded))(scope, receive, send_with_headers)
            return
        token = TOKENS_USED.set(lambda tokens: limiter.count_tokens(client, quota, tokens))
        try:
            await app(scope, receive, send_with_headers)
        finally:
            TOKENS_USED.reset(token)


def metered(
    outputs: AsyncGenerator[GenerationOutput, None],
) -> AsyncGenerator[GenerationOutput, None]:
    """Yield `outputs`. When they end or are closed, report their tokens to `TOKENS_USED`."""
    report = TOKENS_USED.get()
    return outputs if report is None else _metered(outputs, report)


async def _metered(
    outputs: AsyncGenerator[GenerationOutput, None], report: Callable[[int], None]
) -> AsyncGenerator[GenerationOutput, None]:
    usage = Usage(0)
    try:
        async with aclosing(outputs):
            async for output in outputs:
                usage = output.usage
                yield output
    finally:
        report(usage.prompt_tokens + usage.completion_tokens)


def format_duration(seconds: float) -> str:
    """Format seconds in OpenAI's notation: 250ms, 12s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _headers(statuses: Iterable[RateLimitStatus]) -> Iterable[tuple[bytes, bytes]]:
    for status in statuses:
        for name, value in (
            ("limit", str(status.limit)),
            ("remaining", str(status.remaining)),
            ("reset", format_duration(status.reset)),
        ):
            yield f"x-ratelimit-{name}-{status.unit}".encode(), value.encode()


def _error(status: RateLimitStatus) -> ApiError:
    abbreviation = "RPM" if status.unit == "requests" else "TPM"
    return ApiError(
        429,
        f"Rate limit reached for {status.unit} per minute ({abbreviation}): limit {status.limit}. "
        f"Please try again in {format_duration(status.reset)}.",
        type=status.unit,
        code="rate_limit_exceeded",
    )
