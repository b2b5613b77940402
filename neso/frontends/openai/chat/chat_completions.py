"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from neso.frontends.openai.chat.image_fetcher import Media
from neso.frontends.openai.chat.message_format import (
    Message,
    MessageEvent,
    MessageFormat,
    MessageFormats,
    MessageReader,
    Reasoning,
)
from neso.frontends.openai.chat.prompt import ToolUse, chat_prompt
from neso.frontends.openai.choices import Answer, AnswerKind, Choice, PromptRecord, finish_name
from neso.frontends.openai.errors import ApiError, invalid, renamed, too_long
from neso.frontends.openai.logprobs import chat_logprobs
from neso.frontends.openai.model_resolver import Target, Targets
from neso.frontends.openai.request_params import (
    common_values,
    cut_prompt,
    make_sampling,
    refuse_what_cannot_be_honoured,
)
from neso.frontends.openai.schemas import ChatCompletionRequest
from neso.frontends.openai.tool_parsers import Content, ToolCallStart
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import (
    Completion,
    FinishReason,
    GenerationOutput,
    InvalidParameter,
    PromptTooLong,
    SamplingDefaults,
    SamplingParams,
    TokenizerLike,
)

if TYPE_CHECKING:
    from neso.server.tracing import Trace


def chat_names(request: ChatCompletionRequest) -> dict[str, str]:
    """Fields of the engine as the client of a chat knows them."""
    return {"logprobs": "top_logprobs"} if request.top_logprobs is not None else {}


def chat_sampling(
    request: ChatCompletionRequest, defaults: SamplingDefaults, message_format: MessageFormat
) -> SamplingParams:
    """The sampling parameters of a chat; `defaults` are the model's. Without a limit it goes on to that of the context.

    Raises `ApiError`.
    """
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    values = common_values(request, defaults)
    values["max_tokens"] = defaults.max_tokens(getattr(request, limit_name))
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    values["guided_decoding"] = message_format.guided_decoding
    values["shown_special_tokens"] = message_format.shown_special_tokens
    return make_sampling(values, {"max_tokens": limit_name, **chat_names(request)})


class ChatChoice(Choice):
    """Its text is read by `reader`. `text` knows the bytes of the model's tokens."""

    def __init__(
        self, index: int, request: ChatCompletionRequest, reader: MessageReader, text: TokenizerLike
    ) -> None:
        self._index = index
        self._reader = reader
        self._text_tools = text
        self._by_number = bool(request.return_tokens_as_token_ids)
        self._with_reasoning = request.include_reasoning is not False
        self._logprobs: list[dict[str, Any]] | None = [] if request.logprobs else None
        self._token_ids: list[int] | None = [] if request.return_token_ids else None
        self._begun = False
        self._called = False
        self._message = Message()
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    @property
    def cut_off(self) -> bool:
        return self._reader.cut_off

    @property
    def has_ended(self) -> bool:
        return self._finish_reason is not None

    def stream(self, output: GenerationOutput, delta: Completion) -> list[dict[str, Any]]:
        if self.cut_off:
            return []
        pieces = [piece for event in self._read(delta) if (piece := self._piece(event)) is not None]
        if not pieces and (self._logprobs or self._finish_reason is not None):
            pieces = [{}] if self._finish_reason is not None else [{"content": ""}]
        if not self._begun:
            self._begun = True
            pieces.insert(0, {"role": "assistant", "content": ""})
        chunks = [self._chunk(piece) for piece in pieces]
        if chunks and self._finish_reason is not None:
            chunks[-1]["finish_reason"] = self._final_reason()
            chunks[-1]["stop_reason"] = self._stop_reason
        if self._logprobs:
            chunks[-1]["logprobs"] = {"content": self._logprobs}
            self._logprobs = []
        if chunks and self._token_ids is not None:
            chunks[-1]["token_ids"], self._token_ids = self._token_ids, []
        return chunks

    def gather(self, output: GenerationOutput, delta: Completion) -> None:
        self._message.add(self._read(delta))

    def gathered(self) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self._index,
            "message": self._whole_message(),
            "logprobs": None if self._logprobs is None else {"content": self._logprobs},
            "finish_reason": self._final_reason(),
            "stop_reason": self._stop_reason,
        }
        if self._token_ids is not None:
            choice["token_ids"] = self._token_ids
        return choice

    def _read(self, delta: Completion) -> list[MessageEvent]:
        """Take note of a delta; what it makes known of the message."""
        if self._logprobs is not None and delta.logprobs:
            self._logprobs += chat_logprobs(delta.logprobs, self._text_tools, by_number=self._by_number)
        if self._token_ids is not None:
            self._token_ids += delta.token_ids
        events = self._reader.feed(delta.text, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finish_reason = finish_name(delta.finish_reason)
            self._stop_reason = delta.stop_reason
            events += self._reader.finish()
        elif self._reader.cut_off:
            self._finish_reason = finish_name(FinishReason.LENGTH)
        self._called = self._called or any(isinstance(event, ToolCallStart) for event in events)
        return events

    def _final_reason(self) -> str | None:
        if self._reader.cut_off:
            return "length"
        return "tool_calls" if self._called and self._finish_reason == "stop" else self._finish_reason

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _piece(self, event: MessageEvent) -> dict[str, Any] | None:
        """The `delta` of an event."""
        if isinstance(event, Reasoning):
            return _reasoning(event.text) if self._with_reasoning else None
        if isinstance(event, Content):
            return {"content": event.text}
        call: dict[str, Any] = {"index": event.index}
        if isinstance(event, ToolCallStart):
            call |= {"id": _call_id(), "type": "function", "function": {"name": event.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": event.fragment}
        return {"tool_calls": [call]}

    def _whole_message(self) -> dict[str, Any]:
        reasoning, calls = self._message.reasoning, self._message.calls
        whole: dict[str, Any] = {
            "role": "assistant",
            "content": self._message.content or (None if reasoning or calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if reasoning and self._with_reasoning:
            whole |= _reasoning(reasoning)
        if calls:
            whole["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls
            ]
        return whole


def _reasoning(text: str) -> dict[str, str]:
    """DeepSeek's name of it, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


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
