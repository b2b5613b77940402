"""The OpenAPI document, generated from the declared operations and the types of their requests and responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter

import neso
from neso.frontends.openai.app import RESOURCES
from neso.frontends.openai.routing import TEXT, Operation, Parameter, operations_of
from neso.frontends.openai.schemas import ErrorResponse
from neso.frontends.openai_options import AccessOptions

_SECURITY_SCHEME = "API key"
_JSON, _EVENTS = "application/json", "text/event-stream"
_ERRORS = {
    400: "Invalid request; `param` names the field.",
    401: "Missing or invalid API key or required header.",
    403: "Not allowed, or a required header is missing.",
    404: "Unknown model, response or route.",
    409: "Already exists.",
    413: "Request body too large.",
    415: "Request body is compressed.",
    429: "Rate limit exceeded.",
    499: "Request cancelled.",
    500: "Server error.",
    503: "Model or server is not ready.",
}
_ACCESS_ERRORS = (401, 403)
"""Errors of every operation: API keys and required headers."""

SchemaOf = Callable[[Any, str], dict[str, Any]]


def openapi_document(access: AccessOptions | None = None) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document, with a security scheme if `access` requires API keys."""
    access = access or AccessOptions()
    open_groups = access.open_groups if access.keys is not None else ()
    operations = [declared for resource in RESOURCES for _, declared in operations_of(resource)]
    schema_of, definitions = _schemas(operations)
    paths: dict[str, Any] = {}
    for declared in operations:
        described = _describe(declared, schema_of, open_groups)
        for path in declared.paths:
            paths.setdefault(path.replace(":path}", "}"), {})[declared.method.lower()] = described
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Neso",
            "version": neso.__version__,
            "description": "OpenAI-compatible API. Fields that OpenAI does not have are marked as extensions.",
        },
        "paths": paths,
        "components": {"schemas": definitions},
    }
    if access.keys is not None:
        document["components"]["securitySchemes"] = {_SECURITY_SCHEME: {"type": "http", "scheme": "bearer"}}
        document["security"] = [{_SECURITY_SCHEME: []}]
    return document


def _schemas(operations: Sequence[Operation]) -> tuple[SchemaOf, dict[str, Any]]:
    """Return a function that maps a type and mode to a schema, and the definitions referenced by the schemas."""
    used: dict[tuple[Any, Any], None] = {(ErrorResponse, "serialization"): None}
    for declared in operations:
        if declared.request is not None:
            used[declared.request, "validation"] = None
        for response in (declared.response, declared.events):
            if response is not None and not isinstance(response, str):
                used[response, "serialization"] = None
    schemas, definitions = TypeAdapter.json_schemas(
        [(model, mode, TypeAdapter(model)) for model, mode in used],
        ref_template="#/components/schemas/{model}",
    )
    return lambda model, mode: schemas[model, mode], definitions["$defs"]


def _describe(declared: Operation, schema_of: SchemaOf, open_groups: Sequence[str]) -> dict[str, Any]:
    """Return the operation object. Operations of `open_groups` require no key."""
    result: dict[str, Any] = {"tags": [declared.tag], "summary": declared.summary}
    if declared.parameters:
        result["parameters"] = [_parameter(parameter) for parameter in declared.parameters]
    if declared.request is not None:
        content: dict[str, Any] = {"schema": schema_of(declared.request, "validation")}
        if declared.examples:
            content["examples"] = {name: {"value": value} for name, value in declared.examples.items()}
        result["requestBody"] = {"required": declared.body_required, "content": {_JSON: content}}
    result["responses"] = {"200": _success(declared, schema_of)}
    error = {_JSON: {"schema": schema_of(ErrorResponse, "serialization")}}
    for status in sorted({*declared.errors, *_ACCESS_ERRORS}):
        result["responses"][str(status)] = {"description": _ERRORS[status], "content": error}
    if declared.open_group in open_groups:
        result["security"] = []
    return result


def _parameter(parameter: Parameter) -> dict[str, Any]:
    described = {
        "name": parameter.name,
        "in": parameter.place,
        "required": parameter.place == "path",
        "schema": parameter.schema,
    }
    return {**described, "description": parameter.description} if parameter.description else described


def _success(declared: Operation, schema_of: SchemaOf) -> dict[str, Any]:
    result: dict[str, Any] = {"description": "Success."}
    if declared.response == TEXT:
        result["content"] = {TEXT: {"schema": {"type": "string"}}}
    elif declared.response is not None:
        result["content"] = {_JSON: {"schema": schema_of(declared.response, "serialization")}}
    if declared.events is not None:
        kinds = [schema_of(model, "serialization") for model in (declared.events, ErrorResponse)]
        result["content"][_EVENTS] = {"schema": _event_schema(kinds)}
    return result


def _event_schema(data: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of a server-sent event whose data is one of `data`, or `[DONE]`."""
    encoded = {"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": data}}
    return {
        "type": "object",
        "description": "Server-sent events; streams of completions and chat completions end with `[DONE]`.",
        "properties": {
            "event": {"type": "string"},
            "data": {"anyOf": [{"const": "[DONE]"}, encoded]},
        },
        "required": ["data"],
    }
