"""Conversion of a Responses request and its conversation to the equivalent chat completion request."""

from __future__ import annotations

import uuid
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from neso.frontends.openai.chat.prompt import ToolUse, chat_prompt
from neso.frontends.openai.chat.schemas import ChatCompletionRequest
from neso.frontends.openai.errors import ApiError, invalid, validation_error
from neso.frontends.openai.model_resolver import ResolvedModel
from neso.frontends.openai.responses.schemas import (
    AllowedTools,
    FunctionTool,
    NamedFunction,
    ResponseRequest,
    TextFormat,
)
from neso.generation import UNLIMITED_LENGTH, TokenizerLike, cut_text

Item = dict[str, Any]
"""An item of a conversation as plain JSON; the types are those of `schemas.InputItem`."""

_ID_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_UNSUPPORTED = {
    "conversation": "use 'previous_response_id', or send the items",
    "prompt": "use 'instructions' and 'input'",
    "context_management": "use 'truncation'",
    "moderation": "nothing is moderated",
}
_CHAT_FIELDS = {
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
"""Fields of chat completions, and the corresponding field of responses or ""."""


def new_id(prefix: str) -> str:
    """Create a random id."""
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(request: ResponseRequest) -> list[Item]:
    """Return the request's input as items with ids."""
    given = request.input
    if isinstance(given, str):
        return [_normalized({"role": "user", "content": given})]
    return [_normalized(item.model_dump(exclude_none=True)) for item in given]


def _normalized(item: Item) -> Item:
    item = {"type": "message", **item}
    item.setdefault("id", new_id(_ID_PREFIX[item["type"]]))
    if item["type"] == "message":
        if isinstance(item["content"], str):
            kind = "output_text" if item["role"] == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        item.setdefault("status", "completed")
    return item


def chat_request(request: ResponseRequest, context: Sequence[Item]) -> ChatCompletionRequest:
    """Create the chat completion request for the conversation `context`. Raises `ApiError`."""
    extras = dict(request.model_extra or {})
    for name, hint in _UNSUPPORTED.items():
        if extras.get(name) is not None:
            raise invalid(name, f"'{name}' is not supported: {hint}.", "unsupported_parameter")
    for name, equivalent in _CHAT_FIELDS.items():
        if extras.get(name) is not None:
            hint = f" Use '{equivalent}'." if equivalent else ""
            message = f"'{name}' is not a parameter of the Responses API.{hint}"
            raise invalid(name, message, "unsupported_parameter")
    if request.instructions is not None and request.instructions != "":
        context = [
            {"type": "message", "role": "system", "content": request.instructions},
            *context,
        ]
    if not context:
        raise invalid("input", "'input' must contain at least one item.")
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
        **_tool_fields(request),
    }
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    try:
        return ChatCompletionRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise to_responses_error(validation_error(error)) from None


def to_responses_error(error: ApiError) -> ApiError:
    """Convert an error about a field of chat completions to an error about the corresponding field of responses."""
    if error.param is None:
        return error
    root, dot, rest = error.param.partition(".")
    root, bracket, index = root.partition("[")
    equivalent = _CHAT_FIELDS.get(root)
    if not equivalent:
        return error
    # Messages and items are numbered differently.
    param = equivalent if root == "messages" else equivalent + bracket + index + dot + rest
    message = error.message.replace(f"'{error.param}'", f"'{param}'").replace(f"'{root}'", f"'{equivalent}'")
    return ApiError(error.status, message, type=error.type, param=param, code=error.code)


def _tool_fields(request: ResponseRequest) -> dict[str, Any]:
    tools, choice = request.tools or [], request.tool_choice
    fields: dict[str, Any] = {"tool_choice": choice}
    if isinstance(choice, NamedFunction):
        _find_tool(tools, choice.name)
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, AllowedTools):
        tools = [_find_tool(tools, allowed.name) for allowed in choice.tools]
        fields["tool_choice"] = choice.mode
    elif choice == "required" and not tools:
        raise invalid("tool_choice", "'tool_choice' is 'required', but there are no 'tools'.")
    elif not tools:
        fields["tool_choice"] = None  # "none" and "auto" have no effect
    fields["tools"] = [_chat_tool(tool) for tool in tools] or None
    return fields


def _find_tool(tools: Sequence[FunctionTool], name: str) -> FunctionTool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise invalid("tool_choice", f"Invalid 'tool_choice': no tool is named {name!r}.")


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
    return {"type": "function", "function": function}


def _response_format(text_format: TextFormat | None) -> dict[str, Any] | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return {"type": "json_object"}
    schema = text_format.schema_
    if schema is None:
        raise invalid("text.format.schema", "'text.format.schema' is missing.", "missing_required_parameter")
    return {"type": "json_schema", "json_schema": {"name": text_format.name or "answer", "schema": schema}}


def to_messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Convert items to chat messages. Consecutive reasoning, text and calls become one assistant message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # current assistant message, to which items may be added
    for item in items:
        if item["type"] == "function_call_output":
            turn = None
            messages.append(
                {"role": "tool", "tool_call_id": item["call_id"], "content": _joined_text(item["output"])}
            )
        elif item["type"] == "message" and item["role"] != "assistant":
            turn = None
            messages.append({"role": item["role"], "content": _chat_content(item["content"])})
        else:
            if turn is None or not _belongs_to(turn, item):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add_to_turn(turn, item)
    return messages


def _belongs_to(turn: dict[str, Any], item: Item) -> bool:
    """Whether `item` may be appended to the assistant message; the order is reasoning, text, calls."""
    if item["type"] == "function_call":
        return True
    if item["type"] == "message":
        return turn["content"] is None and "tool_calls" not in turn
    return turn["content"] is None and "tool_calls" not in turn and "reasoning_content" not in turn


def _add_to_turn(turn: dict[str, Any], item: Item) -> None:
    if item["type"] == "message":
        turn["content"] = _chat_content(item["content"])
    elif item["type"] == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        turn["reasoning_content"] = "\n".join(part["text"] for part in parts)
    else:
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _chat_content(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [_chat_part(part) for part in content]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _chat_part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    return {"type": "text", "text": part["refusal"] if part["type"] == "refusal" else part["text"]}


def _joined_text(output: str | list[dict[str, Any]]) -> str:
    return output if isinstance(output, str) else "\n".join(part["text"] for part in output)


def truncated_prompt(
    chat: ChatCompletionRequest, tool_use: ToolUse, model: ResolvedModel
) -> tuple[str, tuple[Any, ...]]:
    """Return `chat_prompt` without the oldest turns that do not fit the context length.

    Keeps system messages and the last user turn; the prompt is too long if these do not fit. Leaves room for the
    maximum number of output tokens, by default a quarter of the context, at most half of it.
    """
    tokenizer, max_model_len = model.tokenizer, model.language_model.max_model_len
    prompt, images = chat_prompt(chat, tool_use, tokenizer)
    if max_model_len >= UNLIMITED_LENGTH or _fits(prompt, tokenizer, max_model_len - 1):
        return prompt, images
    defaults = model.language_model.default_sampling
    output = defaults.max_tokens(chat.max_completion_tokens) or max_model_len // 4
    max_prompt = max_model_len - min(output, max_model_len // 2)
    # The first turn is not a candidate: starting there drops no turns.
    starts = [index for index, message in enumerate(chat.messages) if message.role == "user"][1:]
    if not starts:
        return prompt, images

    def fits(start: int) -> bool:
        shorter, _ = chat_prompt(_without_turns_before(chat, start), tool_use, tokenizer)
        return _fits(shorter, tokenizer, max_prompt)

    first = bisect_left(starts, True, key=fits)
    start = starts[min(first, len(starts) - 1)]
    return chat_prompt(_without_turns_before(chat, start), tool_use, tokenizer)


def _without_turns_before(chat: ChatCompletionRequest, start: int) -> ChatCompletionRequest:
    kept = [message for message in chat.messages[:start] if message.role in ("system", "developer")]
    return chat.model_copy(update={"messages": kept + chat.messages[start:]})


def _fits(prompt: str, tokenizer: TokenizerLike, max_tokens: int) -> bool:
    _, at_least = cut_text(tokenizer, prompt, max_tokens)
    return not at_least and len(tokenizer.encode(prompt, add_special_tokens=False)) <= max_tokens
