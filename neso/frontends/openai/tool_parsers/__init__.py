"""Tool call parsers: formats in which models write tool calls."""

from __future__ import annotations

from neso.frontends.openai.tool_parsers.base import (
    MAX_CALL_CHARS,
    Content,
    Function,
    ParsedMessage,
    ToolCallArguments,
    ToolCallStart,
    ToolEvent,
    ToolParser,
    ToolStream,
)
from neso.frontends.openai.tool_parsers.registry import detect_tool_parser, find_tool_parser
from neso.frontends.openai.tool_parsers.xml_tags import HermesParser

__all__ = [
    "MAX_CALL_CHARS",
    "Content",
    "Function",
    "HermesParser",
    "ParsedMessage",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolEvent",
    "ToolParser",
    "ToolStream",
    "detect_tool_parser",
    "find_tool_parser",
]
