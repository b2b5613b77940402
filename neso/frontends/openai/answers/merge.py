"""Several generations at once, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import cast

from neso.generation import GenerationOutput

Indexed = tuple[int, GenerationOutput]


async def merge(generations: Sequence[AsyncIterator[GenerationOutput]]) -> AsyncGenerator[Indexed, None]:
    """The outputs of all, as they come, each with the position of its generation.

    The first error ends the stream, ahead of outputs that wait: a request that is refused for one of its
    prompts is refused before anything is sent. However the stream ends, every generation is closed, which
    aborts the unfinished.
    """
    if len(generations) == 1:
        async with aclosing(_closable(generations[0])) as generation:
            async for output in generation:
                yield 0, output
        return
    queue: asyncio.Queue[Indexed | None] = asyncio.Queue()
    errors: list[Exception] = []
    pumps = [asyncio.create_task(_pump(queue, errors, i, _closable(g))) for i, g in enumerate(generations)]
    running = len(pumps)
    try:
        while running:
            item = await queue.get()
            if errors:
                raise errors[0]
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    queue: asyncio.Queue[Indexed | None],
    errors: list[Exception],
    index: int,
    generation: AsyncGenerator[GenerationOutput, None],
) -> None:
    try:
        async with aclosing(generation):
            async for output in generation:
                queue.put_nowait((index, output))
    except Exception as error:
        errors.append(error)
    queue.put_nowait(None)


def _closable(generation: AsyncIterator[GenerationOutput]) -> AsyncGenerator[GenerationOutput, None]:
    """The contract of `LanguageModel.generate` is that its iterator has `aclose`; its type cannot say so."""
    return cast("AsyncGenerator[GenerationOutput, None]", generation)
