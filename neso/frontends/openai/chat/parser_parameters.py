"""Parameters of a model's configuration that say how the model writes calls and reasoning."""

from __future__ import annotations

from typing import Any

from neso.frontends.openai.parser_registry import AUTO
from neso.server.config.model_config import string_parameter
from neso.server.errors import InvalidArgument

TOOL_PARAMETER, REASONING_PARAMETER = "tool_call_parser", "reasoning_parser"
"""They go before the server's options."""


def check_parsers(config: Any) -> None:
    """Raises `InvalidArgument` for a parser that there is not."""
    if TOOL_PARAMETER not in config.parameters and REASONING_PARAMETER not in config.parameters:
        return
    # It takes a moment, and few models name parsers.
    from neso.frontends.openai.chat.dialects import make_dialect

    try:
        make_dialect(
            string_parameter(config, TOOL_PARAMETER, AUTO),
            string_parameter(config, REASONING_PARAMETER, AUTO),
            "",
        )
    except ValueError as error:
        raise InvalidArgument(f"model '{config.name}': {error}") from None
