"""The formats of the answers to chats."""

from __future__ import annotations

from neso.frontends.openai.chat.dialects import Dialects
from neso.frontends.openai.chat.message_format import MessageFormat
from neso.frontends.openai.chat.tool_use import ToolUse
from neso.frontends.openai.models.targets import Target
from neso.frontends.openai.requests.guided import wanted_form
from neso.frontends.openai.requests.schemas import ChatCompletionRequest
from neso.frontends.openai_options import OpenAIOptions


class MessageFormats:
    """Says how the answer to a chat is written by its model."""

    def __init__(self, options: OpenAIOptions) -> None:
        """Raises `ValueError` for options that name parsers that there are not."""
        self._dialects = Dialects(options)
        self._max_call_chars = options.max_tool_call_parse_bytes

    def of(
        self, request: ChatCompletionRequest, tool_use: ToolUse, target: Target, prompt: str
    ) -> MessageFormat:
        """The format of the answer to `prompt`, which is the chat as the model sees it. Raises `ApiError`."""
        return MessageFormat(
            self._dialects.of(target), tool_use, prompt, wanted_form(request), self._max_call_chars
        )
