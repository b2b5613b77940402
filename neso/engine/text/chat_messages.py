"""Validates and normalizes chat messages for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from neso.generation import InvalidParameter

_TEXT_PARTS = ("text", "input_text", "output_text")
MAX_LEVELS = 100
"""Maximum nesting of lists and objects in a message."""
IMAGE_TOKEN = "<image>"
"""Placeholder of an image in string content: LLaVA's token, which is also printed by templates that accept parts."""
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def prepare_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the messages in the form that templates expect, made of plain JSON values.

    - Null fields are removed, because templates test for the presence of a field.
    - `tool_calls[].function.arguments` are decoded if they are JSON text.
    - Reasoning is set under each of the names that templates read.
    - A list content has parts {"type": "text", "text": …} and {"type": "image"}.

    Raises `InvalidParameter("messages", …)` for an invalid message or content part.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", "must be a list of messages")
    if not messages:
        raise InvalidParameter("messages", "must not be empty")
    return [_prepare(message, f"message {index}") for index, message in enumerate(messages)]


def plain(value: Any, field: str, where: str, levels: int = MAX_LEVELS) -> Any:
    """Return a copy of a JSON value made of plain dicts, lists and scalars.

    Templates can call methods of their arguments, so other types are rejected. Raises `InvalidParameter`.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if not levels:
        raise InvalidParameter(field, f"{where} is nested more than {MAX_LEVELS} levels deep")
    if isinstance(value, Mapping):
        return {str(key): plain(item, field, where, levels - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, field, where, levels - 1) for item in value]
    for base in (str, int, float):  # enumerations and other subclasses
        if isinstance(value, base):
            return base(value.value if isinstance(value, Enum) else value)
    raise InvalidParameter(field, f"{where} holds a {type(value).__name__}, which is not a JSON value")


def flatten_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its content parts joined by newlines."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": "\n".join(part.get("text", IMAGE_TOKEN) for part in content)}


def split_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its string content as a list of one part."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with the arguments of its tool calls as JSON text."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and not isinstance(function.get("arguments", ""), str):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _prepare(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter("messages", f"{where} must be an object")
    fresh = {key: value for key, value in plain(message, "messages", where).items() if value is not None}
    if not isinstance(fresh.get("role"), str):
        raise InvalidParameter("messages", f"{where} has no role")
    if "content" in fresh:
        fresh["content"] = _check_content(fresh["content"], where)
    if "tool_calls" in fresh:
        _parse_arguments(fresh["tool_calls"], where)
    reasoning = next((fresh[name] for name in _REASONING_NAMES if name in fresh), None)
    if reasoning is not None:
        fresh = {"thinking": reasoning, **fresh, "reasoning_content": reasoning}
    return fresh


def _check_content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter("messages", f"the content of {where} must be a string or a list of parts")
    return [
        {"type": "image"}
        if isinstance(part, dict) and part.get("type") == "image"
        else {"type": "text", "text": _part_text(part, where)}
        for part in content
    ]


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidParameter("messages", f"a content part of {where} is not an object")
    kind = part.get("type")
    if kind is None and set(part) == {"text"}:
        kind = "text"
    if kind not in _TEXT_PARTS and kind != "refusal":
        raise InvalidParameter(
            "messages", f"{where} has a content part of type {kind!r}; this model takes text only"
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise InvalidParameter("messages", f"a content part of {where} has no text")
    return text


def _parse_arguments(tool_calls: Any, where: str) -> None:
    """Decode arguments that are JSON text, in place.

    Text that is not a JSON object is kept: it may be model output, and most templates can quote it.
    """
    if not isinstance(tool_calls, list) or not all(isinstance(call, dict) for call in tool_calls):
        raise InvalidParameter("messages", f"tool_calls of {where} must be a list of objects")
    for call in tool_calls:
        function = call.get("function")
        if not isinstance(function, dict):
            continue
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except ValueError:
                continue
            if isinstance(parsed, dict):
                function["arguments"] = parsed
        elif arguments is None:
            function["arguments"] = {}
