"""The reasoning parsers by name, and which one a chat template is for."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

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
_ALIASES = {"think": "qwen3", "deepseek_v3": "qwen3", "glm45": "qwen3"}


def find_reasoning_parser(name: str) -> ReasoningParser | None:
    """The parser of that name, none for "none". Raises `ValueError` that names the ones there are."""
    if name == "none":
        return None
    parsers = {**BUILTIN, **_foreign()}
    name = _ALIASES.get(name, name)
    if name not in parsers:
        raise ValueError(
            f"unknown reasoning parser '{name}', known are auto, none, {', '.join(sorted(parsers))}"
        )
    return parsers[name]()


def detect_reasoning_parser(template: str) -> ReasoningParser | None:
    """The parser for models with this chat template, if it tells of reasoning."""
    for parser in (*_foreign().values(), *BUILTIN.values()):
        if parser.matches(template):
            return parser()
    return None


@cache
def _foreign() -> dict[str, type[ReasoningParser]]:
    return {point.name: point.load() for point in entry_points(group=GROUP)}
