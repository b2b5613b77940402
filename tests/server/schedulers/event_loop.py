"""Helpers that wait for a scheduler."""

from __future__ import annotations

import asyncio
from typing import Any

from neso.server.inference_response import ResponseStream


async def settle(seconds: float = 0.0) -> None:
    """Let time pass and all ready tasks run."""
    await asyncio.sleep(seconds)
    for _ in range(3):
        await asyncio.sleep(0)


async def error_of(stream: ResponseStream) -> Any:
    """Return the error that ends the stream immediately, or None."""
    response = await asyncio.wait_for(anext(stream), 2)
    assert response.final
    return response.error
