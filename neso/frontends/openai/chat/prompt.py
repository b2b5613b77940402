"""From the messages and tools of a chat to the prompt of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from neso.frontends.openai.errors import invalid
from neso.frontends.openai.schemas import ChatCompletionRequest, ChatMessage
from neso.frontends.openai.tool_parsers import Function
from neso.generation import TokenizerLike
from neso.generation.request import split_images

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`offered` is for the chat template, in OpenAI's form; `functions` are those that may be called.

    `mode`: never, as the model likes, or at least once.
    """

    mode: Mode = "none"
    offered: tuple[dict[str, Any], ...] = ()
    functions: tuple[Function, ...] = ()
    many_calls: bool = True

    @classmethod
    def of(
        cls, tools: Sequence[dict[str, Any]] | None, choice: Any = None, *, many_calls: bool = True
    ) -> ToolUse:
        """Of `tools` and `tool_choice` in the form of chats. Raises `ApiError`.

        A choice is none, auto, required, a function by name, or `allowed_tools` with a mode of its own: the model is
        not told of the others.
        """
        if not tools:
            return cls()
        mode: Mode = "auto"
        called = offered = list(tools)
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools")
            if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
                raise invalid("tool_choice", "Invalid 'tool_choice': allowed_tools needs a mode and tools.")
            choice = allowed.get("mode", "auto")
            if choice not in ("auto", "required"):
                raise invalid("tool_choice", "Invalid 'tool_choice': the mode must be auto or required.")
            called = offered = [_named(entry, tools) for entry in allowed["tools"]]
        if isinstance(choice, dict):
            mode, called = "required", [_named(choice, tools)]
            many_calls = False
        elif choice is not None:
            mode = choice
        if mode == "none" or not called:
            return cls()
        return cls(mode, tuple(offered), tuple(map(_function, called)), many_calls)

    @classmethod
    def of_chat(cls, request: ChatCompletionRequest) -> ToolUse:
        """Of a chat's fields. Raises `ApiError`."""
        tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or ()]
        return cls.of(tools, request.tool_choice, many_calls=request.parallel_tool_calls is not False)


def _named(choice: Any, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    for tool in tools:
        if tool["function"]["name"] == name:
            return tool
    raise invalid("tool_choice", f"Invalid 'tool_choice': no tool is named {name!r}.")


def _function(tool: dict[str, Any]) -> Function:
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object"}
    if "properties" in schema and not _OPEN & schema.keys():
        schema = {**schema, "additionalProperties": False}  # no argument that nobody has asked for
    return Function(function["name"], schema, bool(function.get("strict")))


_OPEN = {
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
}
"""What says in a schema whether members may come that are not named."""


_OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")


def chat_prompt(
    request: ChatCompletionRequest, tool_use: ToolUse, text: TokenizerLike
) -> tuple[str, tuple[Any, ...]]:
    """The chat as the model's template writes it, and its images. Raises `ApiError` and `InvalidParameter`."""
    if not text.has_chat_template:
        raise invalid("model", f"The model '{request.model}' has no chat template: use /v1/completions.")
    variables = _variables(request)
    for name in _OWN_FIELDS:
        if name in variables:
            raise invalid("chat_template_kwargs", f"'chat_template_kwargs' must not hold '{name}'.")
    if request.continue_final_message:
        variables["continue_final_message"] = True
    wants_prompt = request.add_generation_prompt
    messages, images = split_images([_template_message(message) for message in request.messages])
    prompt = text.apply_chat_template(
        messages,
        tools=tool_use.offered or None,
        add_generation_prompt=not request.continue_final_message if wants_prompt is None else wants_prompt,
        **variables,
    )
    return prompt, images


def _variables(request: ChatCompletionRequest) -> dict[str, Any]:
    """What the template is told beside the chat."""
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def _template_message(message: ChatMessage) -> dict[str, Any]:
    result = message.model_dump(exclude_unset=True)
    if message.role == "developer":
        result["role"] = "system"  # OpenAI's newer word for it, which templates do not know
    return result
