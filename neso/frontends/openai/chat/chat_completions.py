"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from typing import Any

from neso.frontends.openai.chat.image_fetcher import ImageFetcher
from neso.frontends.openai.chat.message_format import (
    Message,
    MessageEvent,
    MessageFormat,
    MessageFormats,
    MessageParser,
    Reasoning,
)
from neso.frontends.openai.chat.prompt import ToolUse, render_chat
from neso.frontends.openai.chat.schemas import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from neso.frontends.openai.choices import (
    Choice,
    ChoicesResponse,
    PromptRecord,
    ResponseKind,
    finish_reason_name,
)
from neso.frontends.openai.errors import ApiError, invalid, invalid_parameter, prompt_too_long
from neso.frontends.openai.logprobs import chat_logprobs
from neso.frontends.openai.model_resolver import ModelResolver
from neso.frontends.openai.request_params import (
    Prompt,
    make_sampling,
    reject_unsupported,
    sampling_values,
    truncate_prompt,
)
from neso.frontends.openai.routing import RequestContext, operation
from neso.frontends.openai.tool_parsers import Content, ToolCallStart
from neso.frontends.openai_options import OpenAIOptions
from neso.generation import (
    Completion,
    InvalidParameter,
    PromptTooLong,
    SamplingDefaults,
    SamplingParams,
    TokenizerLike,
)

KIND = ResponseKind(
    id_prefix="chatcmpl",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    add_special_tokens=False,
    prompt_fields_in_choices=False,
)
_UNSUPPORTED_PARTS = {
    "input_audio": "audio",
    "audio": "audio",
    "audio_url": "audio",
    "video": "video",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}


class ChatCompletionsApi:
    """Chat completions."""

    def __init__(self, resolver: ModelResolver, images: ImageFetcher, options: OpenAIOptions) -> None:
        """Raises `ValueError` for an unknown parser in `options`."""
        self._resolver = resolver
        self._images = images
        self._formats = MessageFormats(options)

    @operation(
        "POST",
        "/v1/chat/completions",
        tag="Generation",
        request=ChatCompletionRequest,
        response=ChatCompletionResponse,
        events=ChatCompletionStreamResponse,
        examples={
            "question": {
                "model": "neso-pilot",
                "messages": [{"role": "user", "content": "What is TTFT?"}],
                "max_completion_tokens": 16,
            }
        },
        cancellable=True,
    )
    async def create(self, request: ChatCompletionRequest, context: RequestContext) -> Any:
        """Create a chat completion."""
        reject_unsupported(request)
        reject_unsupported_chat(request)
        model = await self._resolver.find(request.model)
        tool_use = ToolUse.of_chat(request)
        rendered, images = await render_chat(request, tool_use, model.tokenizer)
        prompt: Prompt = rendered
        if request.truncate_prompt_tokens is not None:
            prompt = await truncate_prompt(
                rendered,
                model.tokenizer,
                request.truncate_prompt_tokens,
                model.language_model.max_model_len,
                add_special_tokens=bool(request.add_special_tokens),
            )
            if images:
                raise invalid(
                    "truncate_prompt_tokens", "'truncate_prompt_tokens' is for chats without images."
                )
        message_format = self._formats.of(request, tool_use, model, rendered)
        sampling = chat_sampling(request, model.language_model.default_sampling, message_format)
        eager = bool(request.stream)
        choices = [
            ChatChoice(
                index,
                request,
                message_format.parser(eager=eager),
                model.language_model.text,
                names_tool=tool_use.named,
            )
            for index in range(request.n or 1)
        ]
        response = ChoicesResponse(
            KIND,
            request,
            model,
            [PromptRecord(request)],
            choices,
            lambda error: chat_client_error(error, request),
        )
        if images:
            images = await self._images.fetch(images)
        return await response.generate([prompt], sampling, context.trace, images)


class ChatChoice(Choice):
    """A message, parsed by `parser`. `names_tool`: the request names the function, so calling it is no decision."""

    def __init__(
        self,
        index: int,
        request: ChatCompletionRequest,
        parser: MessageParser,
        tokenizer: TokenizerLike,
        *,
        names_tool: bool = False,
    ) -> None:
        self._index = index
        self._parser = parser
        self._tokenizer = tokenizer
        self._tokens_as_ids = bool(request.return_tokens_as_token_ids)
        self._include_reasoning = request.include_reasoning is not False
        self._logprobs: list[dict[str, Any]] | None = [] if request.logprobs else None
        self._token_ids: list[int] | None = [] if request.return_token_ids else None
        self._started = False
        self._has_calls = False
        self._names_tool = names_tool
        self._events: list[MessageEvent] = []
        self._stop_reason: str | int | None = None

    def stream(self, completion: Completion) -> list[dict[str, Any]]:
        if self.cut_off:
            return []
        deltas = []
        for event in self._parse(completion):
            if isinstance(event, Content):
                deltas.append({"content": event.text})
            elif (delta := self._delta(event)) is not None:
                deltas.append(delta)
        if not deltas and (completion.token_ids or self._logprobs or self.finish_reason is not None):
            # A chunk for every step, because clients measure the times between tokens. Like vLLM's, it has no content
            # if a parser holds back the text, which may not be content.
            deltas = [{}] if self._parser.is_active or self.finish_reason is not None else [{"content": ""}]
        if not self._started:
            self._started = True
            deltas.insert(0, {"role": "assistant", "content": ""})
        chunks: list[dict[str, Any]] = [
            {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}
            for delta in deltas
        ]
        if chunks and self.finish_reason is not None:
            chunks[-1]["finish_reason"] = self._final_reason()
            chunks[-1]["stop_reason"] = self._stop_reason
        if self._logprobs:
            chunks[-1]["logprobs"] = {"content": self._logprobs}
            self._logprobs = []
        if chunks and self._token_ids is not None:
            chunks[-1]["token_ids"], self._token_ids = self._token_ids, []
        return chunks

    def add(self, completion: Completion) -> None:
        self._events += self._parse(completion)

    def whole(self) -> dict[str, Any]:
        message = Message(self._events)
        reasoning, calls = message.reasoning, message.calls
        whole: dict[str, Any] = {
            "role": "assistant",
            "content": message.content or (None if reasoning or calls else ""),
            "refusal": None,
            "annotations": [],
        }
        if reasoning and self._include_reasoning:
            whole |= _reasoning_fields(reasoning)
        if calls:
            whole["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
                for name, arguments in calls
            ]
        choice: dict[str, Any] = {
            "index": self._index,
            "message": whole,
            "logprobs": None if self._logprobs is None else {"content": self._logprobs},
            "finish_reason": self._final_reason(),
            "stop_reason": self._stop_reason,
        }
        if self._token_ids is not None:
            choice["token_ids"] = self._token_ids
        return choice

    def _parse(self, completion: Completion) -> list[MessageEvent]:
        if self._logprobs is not None and completion.logprobs:
            self._logprobs += chat_logprobs(completion.logprobs, self._tokenizer, as_ids=self._tokens_as_ids)
        if self._token_ids is not None:
            self._token_ids += completion.token_ids
        parser = self._parser
        events = parser.feed(completion.text, len(completion.token_ids))
        if completion.finish_reason is not None:
            self.finish_reason = finish_reason_name(completion.finish_reason)
            self._stop_reason = completion.stop_reason
            events += parser.finish()
        if parser.cut_off:
            self.cut_off = True
            self.finish_reason = self.finish_reason or "length"
        self.num_reasoning_tokens = parser.num_reasoning_tokens
        for event in events:
            if isinstance(event, ToolCallStart):
                self._has_calls = True
        return events

    def _final_reason(self) -> str | None:
        if self.cut_off:
            return "length"
        if self._has_calls and self.finish_reason == "stop" and not self._names_tool:
            return "tool_calls"
        return self.finish_reason

    def _delta(self, event: MessageEvent) -> dict[str, Any] | None:
        """Return the `delta` for reasoning or a tool call, or None if it is not sent."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return _reasoning_fields(event.text) if self._include_reasoning else None
        call: dict[str, Any] = {"index": event.index}
        if isinstance(event, ToolCallStart):
            call |= {"id": _call_id(), "type": "function", "function": {"name": event.name, "arguments": ""}}
        else:
            call["function"] = {"arguments": event.fragment}
        return {"tool_calls": [call]}


def reject_unsupported_chat(request: ChatCompletionRequest) -> None:
    """Raise `ApiError` for unsupported content and for invalid combinations of fields."""
    extra = request.model_extra or {}
    modalities = extra.get("modalities")
    if modalities and modalities != ["text"]:
        raise invalid(
            "modalities",
            "'modalities' must be ['text']: models of this server generate text only.",
            "unsupported_parameter",
        )
    for index, message in enumerate(request.messages):
        if not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            media = _UNSUPPORTED_PARTS.get(str(part.get("type")))
            if media is not None:
                path = f"messages[{index}].content[{number}]"
                raise invalid(
                    path,
                    f"Invalid '{path}': {media} (type '{part['type']}') are not supported, only text and images.",
                    "unsupported_value",
                )
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    if extra.get("echo"):
        raise invalid("echo", "'echo' is for completions.", "unsupported_parameter")
    if request.tool_choice not in (None, "none") and not request.tools:
        raise invalid("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")


def chat_sampling(
    request: ChatCompletionRequest, defaults: SamplingDefaults, message_format: MessageFormat
) -> SamplingParams:
    """Return the sampling parameters of a chat. `defaults` are the model's.

    Without a limit, a chat may use the whole context.

    Raises `ApiError`.
    """
    limit_name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    values = sampling_values(request, defaults)
    values["max_tokens"] = defaults.max_tokens(getattr(request, limit_name))
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    values["guided_decoding"] = message_format.guided_decoding
    values["shown_special_tokens"] = message_format.shown_special_tokens
    return make_sampling(values, {"max_tokens": limit_name, **_client_names(request)})


def chat_client_error(error: InvalidParameter, request: ChatCompletionRequest) -> ApiError:
    """Convert an engine error to a chat error; prompt errors refer to `messages`."""
    if error.field not in ("prompt", "messages", "images"):
        return invalid_parameter(error, _client_names(request))
    if isinstance(error, PromptTooLong):
        return prompt_too_long("messages", error)
    return invalid("messages", f"Invalid 'messages': {error.message}")


def _client_names(request: ChatCompletionRequest) -> dict[str, str]:
    return {"logprobs": "top_logprobs"} if request.top_logprobs is not None else {}


def _reasoning_fields(text: str) -> dict[str, str]:
    """Return reasoning under DeepSeek's field name and under vLLM's newer field name."""
    return {"reasoning_content": text, "reasoning": text}


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
