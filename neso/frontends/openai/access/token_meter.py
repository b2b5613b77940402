"""Where the tokens of a request are counted, for whoever limits them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar

from neso.generation import GenerationOutput, Usage

TOKENS_USED: ContextVar[Callable[[int], None] | None] = ContextVar("tokens_used", default=None)
"""What to tell of the tokens that the current request has used; None where nobody wants to know."""


def metered(
    outputs: AsyncGenerator[GenerationOutput, None],
) -> AsyncGenerator[GenerationOutput, None]:
    """The same outputs; once they end, in whatever way, their tokens are told."""
    tell = TOKENS_USED.get()
    return outputs if tell is None else _metered(outputs, tell)


async def _metered(
    outputs: AsyncGenerator[GenerationOutput, None], tell: Callable[[int], None]
) -> AsyncGenerator[GenerationOutput, None]:
    usage = Usage(0)
    try:
        async with aclosing(outputs):
            async for output in outputs:
                usage = output.usage
                yield output
    finally:
        tell(usage.prompt_tokens + usage.completion_tokens)
