"""Builders of structural-tag formats, which constrain generated text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Form = dict[str, Any]


def const(text: str) -> Form:
    """Match exactly `text`."""
    return {"type": "const_string", "value": text}


def json_form(schema: dict[str, Any]) -> Form:
    """Match JSON that is valid against a schema."""
    return {"type": "json_schema", "json_schema": schema}


def text_before(end: str) -> Form:
    """Match any text up to and including the first `end`."""
    return tag("", {"type": "any_text"}, end)


def properties(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], bool]]:
    """Return a function's parameters: name, schema including referenced definitions, and whether it is required."""
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
    """Match the elements in order."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Form) -> Form:
    """Match one of the elements."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def tag(begin: str, content: Form, end: str) -> Form:
    """Match `content` between `begin` and `end`."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def repeated(tags: Sequence[Form], *, separator: str, many: bool) -> Form:
    """Match one of `tags`; with `many`, one or more, separated by `separator`."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not many,
    }


def triggered(tags: Sequence[Form], *, trigger: str, many: bool) -> Form:
    """Match any text in which `trigger`, the common prefix of `tags`, is always continued as one of `tags`."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "stop_after_first": not many,
    }


def format_of(structural_tag: Form) -> Form:
    """Return the format of a structural tag, also of one in the older form, with `structures` and `triggers`."""
    if "format" in structural_tag or "structures" not in structural_tag:
        inner: Form = structural_tag.get("format", structural_tag)
        return inner
    tags = [
        tag(structure["begin"], json_form(structure.get("schema", True)), structure["end"])
        for structure in structural_tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": structural_tag.get("triggers"), "tags": tags}


def triggered_by_either(first: Form, second: Form) -> Form | None:
    """Match any text in which the triggers of both formats are continued as their tags.

    Returns None if a format is no `triggered_tags`, or if a tag begins with triggers of both.
    """
    if first["type"] != "triggered_tags" or second["type"] != "triggered_tags":
        return None
    triggers = [*first["triggers"], *second["triggers"]]
    tags = [*first["tags"], *second["tags"]]
    if any(sum(tag["begin"].startswith(trigger) for trigger in triggers) != 1 for tag in tags):
        return None
    return {**first, "triggers": triggers, "tags": tags}
