"""The document."""

from __future__ import annotations

from typing import Any

import neso
from neso.frontends.openai.description.operation import Components, described
from neso.frontends.openai.description.routes import ROUTES
from neso.frontends.openai_options import AccessOptions

_BY_KEY = "API key"


def openapi_document(access: AccessOptions | None = None) -> dict[str, Any]:
    """What the server's OpenAI API takes and gives, by OpenAPI 3.1; with keys, where `access` asks for them."""
    access = access or AccessOptions()
    open_groups = access.open_groups if access.keys is not None else ()
    components = Components()
    paths = {
        path: {method: described(operation, components, open_groups) for method, operation in methods.items()}
        for path, methods in ROUTES.items()
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Neso",
            "version": neso.__version__,
            "description": "OpenAI's API. Fields that OpenAI does not have are called extensions.",
        },
        "paths": paths,
        "components": {"schemas": components.schemas},
    }
    if access.keys is not None:
        document["components"]["securitySchemes"] = {_BY_KEY: {"type": "http", "scheme": "bearer"}}
        document["security"] = [{_BY_KEY: []}]
    return document
