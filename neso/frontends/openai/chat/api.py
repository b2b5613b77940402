"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neso.frontends.openai.answers.answer import Answer, AnswerKind
from neso.frontends.openai.answers.prompt_record import PromptRecord
from neso.frontends.openai.chat.choice import ChatChoice
from neso.frontends.openai.chat.media import Media
from neso.frontends.openai.chat.message_format import MessageFormat
from neso.frontends.openai.chat.message_formats import MessageFormats
from neso.frontends.openai.chat.messages import chat_prompt
from neso.frontends.openai.chat.sampling import chat_names, chat_sampling
from neso.frontends.openai.chat.tool_use import ToolUse
from neso.frontends.openai.errors import ApiError, invalid, renamed, too_long
from neso.frontends.openai.models.targets import Target, Targets
from neso.frontends.openai.requests.prompts import cut_prompt
from neso.frontends.openai.requests.refusals import refuse_what_cannot_be_honoured
from neso.frontends.openai.requests.schemas import ChatCompletionRequest
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import InvalidParameter, PromptTooLong

if TYPE_CHECKING:
    from neso.server.tracing import Trace

KIND = AnswerKind(
    id_prefix="chatcmpl", whole="chat.completion", chunk="chat.completion.chunk", adds_special_tokens=False
)


class ChatApi:
    """Answers chats."""

    def __init__(self, targets: Targets, media: Media, options: OpenAIOptions) -> None:
        """Raises `ValueError` for options that name parsers that there are not."""
        self._targets = targets
        self._media = media
        self._formats = MessageFormats(options)

    async def create(self, request: ChatCompletionRequest, trace: Trace | None = None) -> Any:
        """The response, an ASGI application. Raises `ApiError` and what the core raises."""
        refuse_what_cannot_be_honoured(request)
        target = await self._targets.find(request.model)
        tool_use = ToolUse.of_chat(request)
        prompt, images = chat_prompt(request, tool_use, target.text)
        cut = await cut_prompt(
            prompt,
            target.text,
            request.truncate_prompt_tokens,
            target.language_model.max_model_len,
            add_special_tokens=bool(request.add_special_tokens),
        )
        if cut is not prompt and images:
            raise invalid("truncate_prompt_tokens", "'truncate_prompt_tokens' is for chats without images.")
        message_format = self._formats.of(request, tool_use, target, prompt)
        sampling = chat_sampling(request, target.language_model.default_sampling, message_format)
        answer = Answer(
            KIND,
            request,
            target,
            [self._choice(index, request, target, message_format) for index in range(request.n or 1)],
            lambda error: explain(error, request),
            prompt=PromptRecord(request),
        )
        return await answer.respond([cut], sampling, trace, await self._media.fetched(images))

    def _choice(
        self, index: int, request: ChatCompletionRequest, target: Target, message_format: MessageFormat
    ) -> ChatChoice:
        reader = message_format.reader(eager=bool(request.stream))
        return ChatChoice(index, request, reader, target.language_model.text)


def explain(error: InvalidParameter, request: ChatCompletionRequest) -> ApiError:
    """A refusal in words about the chat: the engine knows a prompt where the client wrote messages."""
    if error.field not in ("prompt", "messages", "images"):
        return renamed(error, chat_names(request))
    if isinstance(error, PromptTooLong):
        return too_long("messages", error)
    return invalid("messages", f"Invalid 'messages': {error.message}")
