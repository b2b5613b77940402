"""The reasoning parsers by name, and which one a chat template is for."""

from __future__ import annotations

from neso.frontends.openai.parser_registry import AUTO, ParserRegistry
from neso.frontends.openai.reasoning_parsers.base import ReasoningParser
from neso.frontends.openai.reasoning_parsers.formats import (
    DeepSeekR1Parser,
    GraniteParser,
    MistralParser,
    SeedOssParser,
    ThinkParser,
)

GROUP = "neso.reasoning_parsers"
"""The entry points of other packages' parsers."""

BUILTIN: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "granite": GraniteParser,
    "mistral": MistralParser,
    "qwen3": ThinkParser,
    "seed_oss": SeedOssParser,
}
ALIASES = {"think": "qwen3", "deepseek_v3": "qwen3", "glm45": "qwen3"}
NONE = "none"
"""Stands for a model that does not reason."""

_REGISTRY = ParserRegistry("reasoning parser", GROUP, BUILTIN, ALIASES, words=(AUTO, NONE))


def find_reasoning_parser(name: str) -> ReasoningParser | None:
    """The parser of that name, none for "none". Raises `ValueError` that names the ones there are."""
    return None if name == NONE else _REGISTRY.find(name)


def detect_reasoning_parser(template: str) -> ReasoningParser | None:
    """The parser for models with this chat template, if it tells of reasoning."""
    return _REGISTRY.detect(template)
