"""The tool call parsers by name, and their detection by chat template."""

from __future__ import annotations

from neso.frontends.openai.parser_registry import ParserRegistry
from neso.frontends.openai.tool_parsers.base import ToolParser
from neso.frontends.openai.tool_parsers.json_calls import (
    GraniteParser,
    JambaParser,
    Llama3Parser,
    MistralParser,
    MistralV11Parser,
    Phi4MiniParser,
)
from neso.frontends.openai.tool_parsers.pythonic import PythonicParser
from neso.frontends.openai.tool_parsers.special_tokens import (
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    KimiK2Parser,
)
from neso.frontends.openai.tool_parsers.xml_tags import Glm45Parser, HermesParser, Qwen3CoderParser

GROUP = "neso.tool_parsers"
"""Entry point group of other packages' parsers."""

BUILTIN: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "glm45": Glm45Parser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "jamba": JambaParser,
    "kimi_k2": KimiK2Parser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
    "mistral_v11": MistralV11Parser,
    "phi4_mini_json": Phi4MiniParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}
ALIASES = {
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}
"""Names used by Triton and vLLM."""

_REGISTRY = ParserRegistry("tool call parser", GROUP, BUILTIN, ALIASES)


def find_tool_parser(name: str) -> ToolParser:
    """Return the parser of that name. Raises `ValueError` listing the known names."""
    return _REGISTRY.find(name)


def detect_tool_parser(template: str) -> ToolParser:
    """Return the parser for models with this chat template; Hermes if no parser matches."""
    return _REGISTRY.detect(template) or HermesParser()
