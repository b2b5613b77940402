"""Text to tokens, without keeping others waiting."""

from __future__ import annotations

import asyncio

from neso.generation.language_model import TextTools

_LONG = 10_000
"""Characters of a text that is tokenized in a thread."""


async def encode_text(tools: TextTools, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """As `TextTools.encode`; a long text does not block the event loop."""
    if len(text) < _LONG:
        return tools.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tools.encode, text, add_special_tokens=add_special_tokens)
