"""How models write tool calls, and how to read them."""

from __future__ import annotations

from neso.frontends.openai.tool_parsers.base import (
    Content,
    ParsedMessage,
    ToolCallArguments,
    ToolCallStart,
    ToolEvent,
    ToolParser,
    ToolStream,
)
from neso.frontends.openai.tool_parsers.hermes import HermesParser

__all__ = [
    "PARSERS",
    "Content",
    "HermesParser",
    "ParsedMessage",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolEvent",
    "ToolParser",
    "ToolStream",
    "find_tool_parser",
]

PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser}


def find_tool_parser(name: str) -> ToolParser:
    """The parser of that name. Raises `ValueError` that names the ones there are."""
    if name not in PARSERS:
        raise ValueError(f"unknown tool call parser '{name}', known are {', '.join(sorted(PARSERS))}")
    return PARSERS[name]()
