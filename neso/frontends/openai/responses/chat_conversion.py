"""Conversations that are too long for their model, without their oldest turns."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from neso.frontends.openai.chat.prompt import ToolUse, chat_prompt
from neso.frontends.openai.errors import ApiError, invalid, validation_error
from neso.frontends.openai.model_resolver import Target
from neso.frontends.openai.responses.schemas import (
    AllowedTools,
    FunctionTool,
    NamedFunction,
    ResponseRequest,
    TextFormat,
)
from neso.frontends.openai.schemas import ChatCompletionRequest
from neso.frontends.openai.tensor_models.language_model import NO_LIMIT
from neso.generation import TokenizerLike

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


_NOT_HERE = {
    "conversation": "use 'previous_response_id', or send the items",
    "prompt": "use 'instructions' and 'input'",
    "context_management": "use 'truncation'",
    "moderation": "nothing is moderated",
}
_OF_CHATS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "n": "",
    "prompt_logprobs": "",
    "return_token_ids": "",
    "return_tokens_as_token_ids": "",
    "truncate_prompt_tokens": "truncation",
    "functions": "tools",
    "function_call": "tool_choice",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat and what they are called here; "" for those that there are not."""
_RENAMED = {name: here for name, here in _OF_CHATS.items() if here}


def chat_request(request: ResponseRequest, context: Sequence[Item]) -> ChatCompletionRequest:
    """The chat whose next message is the response; `context` are the items before it. Raises `ApiError`."""
    extras = dict(request.model_extra or {})
    _refuse(extras)
    if request.instructions is not None and request.instructions != "":
        context = [
            {"type": "message", "role": "system", "content": request.instructions},
            *context,
        ]
    if not context:
        raise invalid("input", "'input' must hold an item.")
    fields = {
        **extras,
        "model": request.model,
        "messages": to_messages(context),
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "logprobs": request.wants_logprobs or None,
        "top_logprobs": request.top_logprobs,
        "parallel_tool_calls": request.parallel_tool_calls,
        "user": request.user,
        "stream": request.stream,
        "response_format": _response_format(request.text.format if request.text is not None else None),
        **_tools(request),
    }
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    try:
        return ChatCompletionRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise renamed_here(validation_error(error)) from None


def renamed_here(error: ApiError) -> ApiError:
    """An error about a field of a chat, about that of the response."""
    if error.param is None:
        return error
    root, dot, rest = error.param.partition(".")
    root, bracket, index = root.partition("[")
    here = _RENAMED.get(root)
    if here is None:
        return error
    # Messages are not counted as items are, so their positions say nothing here.
    param = here if root == "messages" else here + bracket + index + dot + rest
    message = error.message.replace(f"'{error.param}'", f"'{param}'").replace(f"'{root}'", f"'{here}'")
    return ApiError(error.status, message, type=error.type, param=param, code=error.code)


def _refuse(extras: dict[str, Any]) -> None:
    for name, why in _NOT_HERE.items():
        if extras.get(name) is not None:
            raise invalid(name, f"'{name}' is not supported: {why}.", "unsupported_parameter")
    for name, here in _OF_CHATS.items():
        if extras.get(name) is not None:
            hint = f" Use '{here}'." if here else ""
            raise invalid(name, f"'{name}' is no parameter of a response.{hint}", "unsupported_parameter")


def _tools(request: ResponseRequest) -> dict[str, Any]:
    """The fields of a chat about tools."""
    tools, choice = request.tools or [], request.tool_choice
    fields: dict[str, Any] = {"tool_choice": choice}
    if isinstance(choice, NamedFunction):
        _find(tools, choice.name)
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, AllowedTools):
        tools = [_find(tools, allowed.name) for allowed in choice.tools]
        fields["tool_choice"] = choice.mode
    elif choice == "required" and not tools:
        raise invalid("tool_choice", "'tool_choice' is 'required', but there are no 'tools'.")
    elif not tools:
        fields["tool_choice"] = None  # "none" and "auto" say nothing then
    fields["tools"] = [_chat_tool(tool) for tool in tools] or None
    return fields


def _find(tools: Sequence[FunctionTool], name: str) -> FunctionTool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise invalid("tool_choice", f"Invalid 'tool_choice': no tool is named {name!r}.")


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}


def _response_format(asked: TextFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    if asked.schema_ is None:
        raise invalid("text.format.schema", "'text.format.schema' is missing.", "missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"name": asked.name or "answer", "schema": asked.schema_}}


def truncated_prompt(
    chat: ChatCompletionRequest, tool_use: ToolUse, target: Target
) -> tuple[str, tuple[Any, ...]]:
    """As `chat_prompt`; if that is too long, without so many of the oldest turns that there is room for an answer.

    What the system says stays, and so does the last turn of the user. If that alone is too long, so is the prompt.
    """
    text, max_model_len = target.text, target.language_model.max_model_len
    prompt, images = chat_prompt(chat, tool_use, text)
    if max_model_len >= NO_LIMIT or _length(prompt, text) < max_model_len:
        return prompt, images
    answer = (
        target.language_model.default_sampling.max_tokens(chat.max_completion_tokens) or max_model_len // 4
    )
    room = max_model_len - min(answer, max_model_len // 2)
    starts = _turns(chat)
    if not starts:
        return prompt, images

    def is_short_enough(start: int) -> bool:
        return _length(chat_prompt(_from(chat, start), tool_use, text)[0], text) <= room

    found = bisect_left(starts, True, key=is_short_enough)
    return chat_prompt(_from(chat, starts[min(found, len(starts) - 1)]), tool_use, text)


def _turns(chat: ChatCompletionRequest) -> list[int]:
    """Where turns of the user begin, but for the first: what is before one of them may be left out."""
    users = [index for index, message in enumerate(chat.messages) if message.role == "user"]
    return users[1:]


def _from(chat: ChatCompletionRequest, start: int) -> ChatCompletionRequest:
    kept = [message for message in chat.messages[:start] if message.role in ("system", "developer")]
    return chat.model_copy(update={"messages": kept + chat.messages[start:]})


def _length(prompt: str, text: TokenizerLike) -> int:
    return len(text.encode(prompt, add_special_tokens=False))
