"""The document."""

from __future__ import annotations

from typing import Any

import neso
from neso.frontends.openai.description.answers import ChatCompletionChunk
from neso.frontends.openai.description.operation import Components, described
from neso.frontends.openai.description.routes import ROUTES


def openapi_document() -> dict[str, Any]:
    """What the server's OpenAI API takes and gives, by OpenAPI 3.1."""
    components = Components()
    components.add(ChatCompletionChunk, "serialization")
    paths = {
        path: {method: described(operation, components) for method, operation in methods.items()}
        for path, methods in ROUTES.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Neso",
            "version": neso.__version__,
            "description": "OpenAI's API. Fields that OpenAI does not have are called extensions.",
        },
        "paths": paths,
        "components": {"schemas": components.schemas},
    }
