"""Conversations that are too long for their model, without their oldest turns."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from neso.frontends.openai.chat.messages import chat_prompt
from neso.frontends.openai.chat.tool_use import ToolUse
from neso.frontends.openai.models.targets import Target
from neso.frontends.openai.requests.schemas import ChatCompletionRequest
from neso.frontends.openai.tensor_models.model import NO_LIMIT
from neso.generation import TokenizerLike


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
