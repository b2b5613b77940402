"""Requests and tokens a minute."""

from __future__ import annotations

import asyncio
import time

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter

from neso.frontends.openai.access.standing import Standing
from neso.frontends.openai_options import Quota


class Quotas:
    """Counts what clients ask for over sliding windows of a minute, in the memory of this process."""

    def __init__(self) -> None:
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._charges: set[asyncio.Task[None]] = set()

    async def take(self, client: str, quota: Quota) -> tuple[list[Standing], Standing | None]:
        """Count a request. How `client` stands then, and the limit at which the request must be refused, if any."""
        standings: list[Standing] = []
        refused = None
        if quota.tokens:
            tokens = await self._standing("tokens", client, quota.tokens)
            standings.append(tokens)
            refused = None if tokens.remaining else tokens
        if quota.requests:
            limit = RateLimitItemPerMinute(quota.requests)
            taken = refused is None and await self._limiter.hit(limit, "requests", client)
            requests = await self._standing("requests", client, quota.requests)
            standings.append(requests)
            if refused is None and not taken:
                refused = requests
        return standings, refused

    def charge(self, client: str, quota: Quota, tokens: int) -> None:
        """Count tokens that were used: they are known once they are. What exceeds the limit is let go."""
        if quota.tokens and tokens:
            task = asyncio.ensure_future(self._charge(client, quota.tokens, tokens))
            self._charges.add(task)
            task.add_done_callback(self._charges.discard)

    async def _charge(self, client: str, limit: int, tokens: int) -> None:
        remaining = (await self._standing("tokens", client, limit)).remaining
        if remaining:
            cost = min(tokens, remaining)
            await self._limiter.hit(RateLimitItemPerMinute(limit), "tokens", client, cost=cost)

    async def _standing(self, what: str, client: str, limit: int) -> Standing:
        stats = await self._limiter.get_window_stats(RateLimitItemPerMinute(limit), what, client)
        return Standing(what, limit, stats.remaining, max(stats.reset_time - time.time(), 0.0))
