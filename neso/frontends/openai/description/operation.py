"""Operations of the OpenAPI document, put together from pydantic's schemas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from neso.frontends.openai.description.answers import Error

_REFERENCES = "#/components/schemas/{model}"
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
ERRORS = {
    400: "The request is not as it must be; `param` names the field.",
    401: "An API key, or a header that is asked for, is missing or wrong.",
    403: "It is not allowed, or a header that is asked for is missing.",
    404: "There is no such model, response or route.",
    409: "It is there already.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "Too many requests.",
    499: "The request was cancelled.",
    500: "The server failed.",
    503: "The model, or the server, is not ready.",
}
_REFUSED = (401, 403)
"""Any route may be for those with a key, or with a header (`restricted`)."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a path or of a query."""

    name: str
    place: Literal["path", "query"]
    schema: dict[str, Any]
    description: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "in": self.place,
            "required": self.place == "path",
            "schema": self.schema,
            **({"description": self.description} if self.description else {}),
        }


@dataclass(frozen=True)
class Operation:
    """One method of one route.

    `answer` is a pydantic class, or the media type of what is no JSON, "" for no body. `events` says that the answer
    may be a stream, and what the data of its events are. `open_group`, of `OPEN_GROUPS`, may be left open where others
    ask for a key.
    """

    tag: str
    summary: str
    answer: type[BaseModel] | str
    body: type[BaseModel] | None = None
    examples: dict[str, dict[str, Any]] = field(default_factory=dict)
    parameters: Sequence[Parameter] = ()
    events: type[BaseModel] | None = None
    errors: Sequence[int] = (400, 404, 413, 415, 429, 499, 500, 503)
    body_required: bool = True
    open_group: str = ""


class Components:
    """The schemas that a document refers to."""

    def __init__(self) -> None:
        self.schemas: dict[str, Any] = {}

    def add(self, model: type[BaseModel], mode: Literal["validation", "serialization"]) -> dict[str, Any]:
        """A reference to the schema of `model`, which is added with all that it refers to."""
        schema = model.model_json_schema(ref_template=_REFERENCES, mode=mode)
        self.schemas.update(schema.pop("$defs", {}))
        self.schemas[model.__name__] = schema
        return {"$ref": _REFERENCES.format(model=model.__name__)}


def described(operation: Operation, components: Components, open_groups: Sequence[str]) -> dict[str, Any]:
    """The operation as the document has it. `open_groups` ask for no key."""
    result: dict[str, Any] = {"tags": [operation.tag], "summary": operation.summary}
    if operation.parameters:
        result["parameters"] = [parameter.as_dict() for parameter in operation.parameters]
    if operation.body is not None:
        content: dict[str, Any] = {"schema": components.add(operation.body, "validation")}
        if operation.examples:
            content["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
        result["requestBody"] = {"required": operation.body_required, "content": {JSON: content}}
    result["responses"] = {"200": _success(operation, components)}
    error = {JSON: {"schema": components.add(Error, "serialization")}}
    for status in sorted({*operation.errors, *_REFUSED}):
        result["responses"][str(status)] = {"description": ERRORS[status], "content": error}
    if operation.open_group in open_groups:
        result["security"] = []
    return result


def _success(operation: Operation, components: Components) -> dict[str, Any]:
    if operation.answer == "":
        return {"description": "Yes."}
    if isinstance(operation.answer, str):
        return {"description": "It is done.", "content": {operation.answer: {"schema": {"type": "string"}}}}
    description = (operation.answer.__doc__ or "").strip().splitlines()[0]
    content = {JSON: {"schema": components.add(operation.answer, "serialization")}}
    if operation.events is not None:
        kinds = [components.add(model, "serialization") for model in (operation.events, Error)]
        content[EVENTS] = {"schema": _event(kinds)}
    return {"description": description, "content": content}


def _event(data: list[dict[str, Any]]) -> dict[str, Any]:
    """One event of a stream, as OpenAPI has them: its fields as strings. `data`: what its data may be."""
    encoded = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": data}}
    return {
        "type": "object",
        "description": "Server-sent events; the last one of a completion or a chat is `[DONE]`.",
        "properties": {
            "event": {"type": "string"},
            "data": {"anyOf": [{"const": "[DONE]"}, encoded]},
        },
        "required": ["data"],
    }
