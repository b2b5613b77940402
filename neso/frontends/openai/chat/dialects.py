"""How each model writes calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from neso.frontends.openai.errors import ApiError
from neso.frontends.openai.models.targets import Target
from neso.frontends.openai.options import OpenAIOptions
from neso.frontends.openai.reasoning_parsers import (
    ReasoningParser,
    detect_reasoning_parser,
    find_reasoning_parser,
)
from neso.frontends.openai.tool_parsers import AUTO, ToolParser, detect_tool_parser, find_tool_parser

TOOL_PARAMETER, REASONING_PARAMETER = "tool_call_parser", "reasoning_parser"
"""Parameters of a model's configuration, which go before the server's options."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The parsers for one model's messages; `reasoning` None for a model that does not reason."""

    tools: ToolParser
    reasoning: ReasoningParser | None


class Dialects:
    """The dialects of the server's models: as their configuration says, the server's options, or their template."""

    def __init__(self, options: OpenAIOptions) -> None:
        """Raises `ValueError` for a parser that there is not."""
        self._options = options
        _make(options.tool_call_parser, options.reasoning_parser, "")

    def of(self, target: Target) -> Dialect:
        """The dialect of a model. Raises `ApiError` if its configuration names a parser that there is not."""
        names = []
        for parameter, default in (
            (TOOL_PARAMETER, self._options.tool_call_parser),
            (REASONING_PARAMETER, self._options.reasoning_parser),
        ):
            parameters = target.model.config.parameters
            names.append(parameters[parameter].string_value if parameter in parameters else default)
        try:
            return _make(names[0], names[1], target.text.chat_template_source)
        except ValueError as error:
            raise ApiError(500, f"model '{target.model.name}': {error}") from None


@lru_cache(256)
def _make(tools: str, reasoning: str, template: str) -> Dialect:
    return Dialect(
        detect_tool_parser(template) if tools == AUTO else find_tool_parser(tools),
        detect_reasoning_parser(template) if reasoning == AUTO else find_reasoning_parser(reasoning),
    )
