"""Which functions the model is told of, and which it may or must call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from neso.frontends.openai.errors import invalid
from neso.frontends.openai.requests.schemas import ChatCompletionRequest
from neso.frontends.openai.tool_parsers import Function

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
