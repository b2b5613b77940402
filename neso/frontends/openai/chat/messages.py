"""From the messages and tools of a chat to the prompt of its model."""

from __future__ import annotations

from typing import Any

from neso.frontends.openai.chat.tool_use import ToolUse
from neso.frontends.openai.errors import invalid
from neso.frontends.openai.requests.schemas import ChatCompletionRequest, ChatMessage
from neso.generation import TokenizerLike
from neso.generation.request import split_images

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
