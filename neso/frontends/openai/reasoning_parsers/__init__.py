"""How models write what they think before they answer, and how to tell it from the answer."""

from __future__ import annotations

from neso.frontends.openai.reasoning_parsers.base import ReasoningParser, ReasoningStream, Split
from neso.frontends.openai.reasoning_parsers.registry import detect_reasoning_parser, find_reasoning_parser

__all__ = [
    "ReasoningParser",
    "ReasoningStream",
    "Split",
    "detect_reasoning_parser",
    "find_reasoning_parser",
]
