"""OpenAI's HTTP API over the server's core.

Importing this package is cheap; `create_app` brings in FastAPI when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neso.frontends.openai_options import OpenAIOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

    from neso.server.core import Core

__all__ = ["OpenAIOptions", "check_model_config", "create_app"]


def create_app(core: Core, options: OpenAIOptions | None = None) -> FastAPI:
    """The ASGI application that serves OpenAI's API for the language models of `core`."""
    from neso.frontends.openai.app import create_app

    return create_app(core, options or OpenAIOptions())


def check_model_config(config: Any) -> None:
    """Raises `InvalidArgument` for a configuration that names parsers which there are not."""
    from neso.frontends.openai.chat.message_format import check_parsers

    check_parsers(config)
