"""The OpenAI-compatible HTTP API of the server.

Importing this package is cheap; `create_app` imports the implementation when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neso.frontends.openai_options import OpenAIOptions

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from neso.server.core import Core

__all__ = ["OpenAIOptions", "check_model_config", "create_app"]


def create_app(core: Core, options: OpenAIOptions | None = None) -> Starlette:
    """Create the ASGI application that serves the models of `core`.

    Raises `ValueError` for an unknown parser, tokenizer or chat template in `options`.
    """
    from neso.frontends.openai.app import create_app

    return create_app(core, options or OpenAIOptions())


def check_model_config(config: Any) -> None:
    """Raise `InvalidArgument` if a model configuration names an unknown tool call or reasoning parser."""
    if not {"tool_call_parser", "reasoning_parser"} & set(config.parameters):
        return  # before the imports, which are slow
    from neso.frontends.openai.chat.message_format import check_parser_parameters

    check_parser_parameters(config)
