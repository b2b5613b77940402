"""Conversion of chat messages and tools to the model's prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from neso.frontends.openai.chat.schemas import ChatCompletionRequest
from neso.frontends.openai.errors import invalid
from neso.frontends.openai.tool_parsers import Function
from neso.generation import TokenizerLike
from neso.generation.request import split_images

_RESERVED_VARIABLES = (
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
)
_OPEN_SCHEMA_KEYWORDS = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
}
"""Keywords of a JSON schema that allow or forbid unnamed properties."""


def chat_prompt(
    request: ChatCompletionRequest, tool_use: ToolUse, tokenizer: TokenizerLike
) -> tuple[str, tuple[Any, ...]]:
    """Return the prompt, rendered by the chat template, and the images. Raises `ApiError` and `InvalidParameter`."""
    if not tokenizer.has_chat_template:
        raise invalid("model", f"The model '{request.model}' has no chat template: use /v1/completions.")
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    for name in _RESERVED_VARIABLES:
        if name in variables:
            raise invalid("chat_template_kwargs", f"'chat_template_kwargs' must not contain '{name}'.")
    if request.continue_final_message:
        variables["continue_final_message"] = True
    add_generation_prompt = request.add_generation_prompt
    if add_generation_prompt is None:
        add_generation_prompt = not request.continue_final_message
    messages = []
    for message in request.messages:
        fields = message.model_dump(exclude_unset=True)
        if message.role == "developer":
            fields["role"] = "system"  # templates do not know OpenAI's newer name
        messages.append(fields)
    plain_messages, images = split_images(messages)
    prompt = tokenizer.apply_chat_template(
        plain_messages,
        tools=tool_use.offered or None,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )
    return prompt, images


_MANY_MESSAGES = 64
"""Number of messages from which a chat is rendered in a thread."""


async def render_chat(
    request: ChatCompletionRequest, tool_use: ToolUse, tokenizer: TokenizerLike
) -> tuple[str, tuple[Any, ...]]:
    """Like `chat_prompt`, but renders long chats in a thread to keep the event loop responsive."""
    if len(request.messages) < _MANY_MESSAGES:
        return chat_prompt(request, tool_use, tokenizer)
    return await asyncio.to_thread(chat_prompt, request, tool_use, tokenizer)


ToolMode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request.

    mode: whether the model must not, may or must call a function.
    offered: tools for the chat template, in OpenAI's format.
    functions: functions that may be called, a subset of `offered`.
    many_calls: whether more than one call is allowed.
    named: whether `tool_choice` names the function.
    """

    mode: ToolMode = "none"
    offered: tuple[dict[str, Any], ...] = ()
    functions: tuple[Function, ...] = ()
    many_calls: bool = True
    named: bool = False

    @classmethod
    def of(
        cls, tools: Sequence[dict[str, Any]] | None, choice: Any = None, *, many_calls: bool = True
    ) -> ToolUse:
        """Create from `tools` and `tool_choice` in the format of chat completions. Raises `ApiError`.

        `tool_choice` is none, auto, required, a named function, or `allowed_tools` with its own mode. Only allowed
        tools are offered.
        """
        if not tools:
            return cls()
        mode: ToolMode = "auto"
        callable_tools = offered = list(tools)
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools")
            if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
                raise invalid("tool_choice", "Invalid 'tool_choice': allowed_tools needs a mode and tools.")
            choice = allowed.get("mode", "auto")
            if choice not in ("auto", "required"):
                raise invalid("tool_choice", "Invalid 'tool_choice': the mode must be auto or required.")
            callable_tools = offered = [_find_tool(entry, tools) for entry in allowed["tools"]]
        named = isinstance(choice, dict)
        if named:
            mode, callable_tools = "required", [_find_tool(choice, tools)]
            many_calls = False
        elif choice is not None:
            mode = choice
        if mode == "none" or not callable_tools:
            return cls()
        return cls(mode, tuple(offered), tuple(map(_function, callable_tools)), many_calls, named)

    @classmethod
    def of_chat(cls, request: ChatCompletionRequest) -> ToolUse:
        """Create from a chat completion request. Raises `ApiError`."""
        if not request.tools:
            return cls()
        tools = [tool.model_dump(exclude_unset=True) for tool in request.tools]
        return cls.of(tools, request.tool_choice, many_calls=request.parallel_tool_calls is not False)


def _find_tool(choice: Any, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise invalid("tool_choice", f"Invalid 'tool_choice': no tool is named {name!r}.")


def _function(tool: dict[str, Any]) -> Function:
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object"}
    if "properties" in schema and not _OPEN_SCHEMA_KEYWORDS & schema.keys():
        schema = {**schema, "additionalProperties": False}  # otherwise the model could invent arguments
    return Function(function["name"], schema, bool(function.get("strict")))
