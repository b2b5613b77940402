"""Pieces of structural tags: what a message must look like in which functions are called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Form = dict[str, Any]


def const(text: str) -> Form:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def json_form(schema: dict[str, Any]) -> Form:
    """JSON that fits a schema."""
    return {"type": "json_schema", "json_schema": schema}


def text_before(end: str) -> Form:
    """Any text up to the first `end`, and that."""
    return tag("", {"type": "any_text"}, end)


def properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """The parameters of a function: name, schema with the definitions that it may refer to, whether it is required."""
    definitions: dict[str, Any] = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    required = schema.get("required", ())
    members = schema.get("properties", {})
    if not isinstance(members, dict):
        return []
    return [
        (name, {**value, **definitions} if isinstance(value, dict) else {}, name in required)
        for name, value in members.items()
    ]


def sequence(*elements: Form) -> Form:
    """One after another."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Form) -> Form:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Form, end: str) -> Form:
    """`content` between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def repeated(tags: Sequence[Form], *, separator: str, many: bool) -> Form:
    """One of `tags`, or several."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not many,
    }


def triggered(tags: Sequence[Form], *, trigger: str, many: bool) -> Form:
    """Any text, in which one of `tags` follows where `trigger`, the beginning of all of them, is written."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "stop_after_first": not many,
    }
