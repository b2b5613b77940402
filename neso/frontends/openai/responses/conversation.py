"""From the items of a conversation to the messages of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from neso.frontends.openai.responses.schemas import ResponseRequest

Item = dict[str, Any]
"""An item as plain JSON, of one of the types in `item_schemas`."""

_ID_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_id(prefix: str) -> str:
    """An id that nobody guesses."""
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(request: ResponseRequest) -> list[Item]:
    """The request's input as items, each with an id, as they are listed later."""
    given = request.input
    if isinstance(given, str):
        return [_listed({"role": "user", "content": given})]
    return [_listed(item.model_dump(exclude_none=True)) for item in given]


def _listed(item: Item) -> Item:
    listed = {"type": "message", **item}
    listed.setdefault("id", new_id(_ID_PREFIX[listed["type"]]))
    if listed["type"] == "message":
        if isinstance(listed["content"], str):
            kind = "output_text" if listed["role"] == "assistant" else "input_text"
            listed["content"] = [{"type": kind, "text": listed["content"]}]
        listed.setdefault("status", "completed")
    return listed


def to_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The messages of a chat. Reasoning, text and calls that follow each other are one message of the assistant."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that still grows
    for item in items:
        if item["type"] == "function_call_output":
            turn = None
            messages.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": _text_of(item["output"])}
            )
        elif item["type"] == "message" and item["role"] != "assistant":
            turn = None
            messages.append({"role": item["role"], "content": _content(item["content"])})
        else:
            if turn is None or not _can_grow_by(turn, item):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add_to_turn(turn, item)
    return messages


def _can_grow_by(turn: dict[str, Any], item: Item) -> bool:
    """Whether `item` may belong to what the assistant said in one go: first thoughts, then text, then calls."""
    if item["type"] == "function_call":
        return True
    if item["type"] == "message":
        return turn["content"] is None and "tool_calls" not in turn
    return turn["content"] is None and "tool_calls" not in turn and "reasoning_content" not in turn


def _add_to_turn(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = _content(item["content"])
    elif item["type"] == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        turn["reasoning_content"] = "\n".join(part["text"] for part in parts)
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A message's content as chats have it."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "text", "text": part["refusal"] if part["type"] == "refusal" else part["text"]}


def _text_of(output: str | list[dict[str, Any]]) -> str:
    return output if isinstance(output, str) else "\n".join(part["text"] for part in output)
