"""Short ways to wait for what a scheduler does."""

from __future__ import annotations

import asyncio
from typing import Any

from neso.server.inference_response import ResponseStream


async def settle(seconds: float = 0.0) -> None:
    """Let time pass, and all that is ready to run."""
    await asyncio.sleep(seconds)
    for _ in range(3):
        await asyncio.sleep(0)


async def error_of(stream: ResponseStream) -> Any:
    """The error that ends the stream at once, None if it is good."""
    response = await asyncio.wait_for(anext(stream), 2)
    assert response.final
    return response.error
