"""A request for a response, as the request for a chat that it amounts to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from neso.frontends.openai.errors import ApiError, invalid, validation_error
from neso.frontends.openai.requests.schemas import ChatCompletionRequest
from neso.frontends.openai.responses.conversation import Item, to_messages
from neso.frontends.openai.responses.schemas import (
    AllowedTools,
    FunctionTool,
    NamedFunction,
    ResponseRequest,
    TextFormat,
)

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
