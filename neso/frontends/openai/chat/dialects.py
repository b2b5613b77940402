"""How each model writes calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from neso.frontends.openai.chat.parser_parameters import REASONING_PARAMETER, TOOL_PARAMETER
from neso.frontends.openai.errors import ApiError
from neso.frontends.openai.models.targets import Target
from neso.frontends.openai.parser_registry import AUTO
from neso.frontends.openai.reasoning_parsers import (
    ReasoningParser,
    detect_reasoning_parser,
    find_reasoning_parser,
)
from neso.frontends.openai.tool_parsers import ToolParser, detect_tool_parser, find_tool_parser
from neso.frontends.openai_options import OpenAIOptions
from neso.server.config.parameters import string_parameter


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
        make_dialect(options.tool_call_parser, options.reasoning_parser, "")

    def of(self, target: Target) -> Dialect:
        """The dialect of a model. Raises `ApiError` if its configuration names a parser that there is not."""
        config, options = target.model.config, self._options
        tools = string_parameter(config, TOOL_PARAMETER, options.tool_call_parser)
        reasoning = string_parameter(config, REASONING_PARAMETER, options.reasoning_parser)
        try:
            return make_dialect(tools, reasoning, target.text.chat_template_source)
        except ValueError as error:
            raise ApiError(500, f"model '{target.model.name}': {error}") from None


@lru_cache(256)
def make_dialect(tools: str, reasoning: str, template: str) -> Dialect:
    """Of parsers by name, "auto" of what `template` tells. Raises `ValueError` for a parser that there is not."""
    return Dialect(
        detect_tool_parser(template) if tools == AUTO else find_tool_parser(tools),
        detect_reasoning_parser(template) if reasoning == AUTO else find_reasoning_parser(reasoning),
    )
