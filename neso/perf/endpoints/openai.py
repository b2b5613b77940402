"""Endpoints of the OpenAI API: chat (with images), completions, responses, embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson

from neso.perf.endpoints.base import (
    History,
    HttpEndpoint,
    ResponseError,
    add_output,
    add_text,
    encode,
    raise_error,
    require_text,
    set_event_usage,
    set_usage,
)
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest

_loads = orjson.loads


class _OpenAIEndpoint(HttpEndpoint):
    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        fields = request.payload if request.payload is not None else self.fields(request, history)
        fields = {"model": request.adapter or model, **fields}
        if self.streaming:
            fields |= self.stream_fields()
        return encode(fields, request)

    def fields(self, request: PerfRequest, history: History) -> dict[str, Any]:
        """Return the JSON fields of a request without a payload, except `model` and those of streams."""
        raise NotImplementedError

    def stream_fields(self) -> dict[str, Any]:
        """Return the JSON fields that request a stream."""
        return {"stream": True}


class _ChunkedEndpoint(_OpenAIEndpoint):
    """Streams chunks with `choices` and, if requested, `usage`."""

    def stream_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"stream": True}
        if self.options.usage:
            usage = {"include_usage": True}
            if self.options.per_chunk_usage:
                usage["continuous_usage_stats"] = True
            fields["stream_options"] = usage
        return fields

    def event(self, record: RequestRecord, data: bytes, now: int) -> None:
        chunk = _loads(data)
        had_output = False
        choices = chunk.get("choices")
        if choices:
            had_output = self.read_choices(record, choices, now)
        elif "error" in chunk:
            raise_error(chunk)
        usage = chunk.get("usage")
        if usage:
            set_event_usage(record, usage, had_output)

    def read_choices(self, record: RequestRecord, choices: list[dict[str, Any]], now: int) -> bool:
        """Note the output of a chunk; returns whether there is any."""
        raise NotImplementedError


class ChatEndpoint(_ChunkedEndpoint):
    """Chat completions, with images for vision models."""

    path: ClassVar[str] = "/v1/chat/completions"
    text_key: ClassVar[bytes] = b'"content":"'

    def fields(self, request: PerfRequest, history: History) -> dict[str, Any]:
        messages = request.messages
        if messages is None:
            require_text(request, "chat")
            messages = [*history, self.message(request)]
            if request.system:
                messages.insert(0, {"role": "system", "content": request.system})
        fields: dict[str, Any] = {"messages": messages}
        if request.max_tokens is not None:
            name = "max_tokens" if self.options.legacy_max_tokens else "max_completion_tokens"
            fields[name] = request.max_tokens
        if request.min_tokens is not None:
            fields["min_tokens"] = request.min_tokens
        return fields

    def message(self, request: PerfRequest) -> dict[str, Any]:
        if not request.images:
            return {"role": "user", "content": request.text}
        parts: list[dict[str, Any]] = [{"type": "text", "text": request.text}]
        parts += [{"type": "image_url", "image_url": {"url": image}} for image in request.images]
        return {"role": "user", "content": parts}

    def read_choices(self, record: RequestRecord, choices: list[dict[str, Any]], now: int) -> bool:
        had_output = False
        for choice in choices:
            delta = choice.get("delta")
            if not delta:
                continue
            text = delta.get("content")
            if text:
                add_output(record, text, now)
                had_output = True
                continue
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            if reasoning:
                record.arrivals_ns.append(now)
                add_text(record, reasoning)
                had_output = True
            elif delta.get("tool_calls"):
                add_output(record, "", now)
                had_output = True
        return had_output

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = _loads(body)
        raise_error(message)
        for choice in message["choices"]:
            reply = choice["message"]
            reasoning = reply.get("reasoning_content") or reply.get("reasoning")
            if reasoning:
                add_text(record, reasoning)
            add_text(record, reply.get("content") or "")
        _add_response(record, message, now)


class CompletionsEndpoint(_ChunkedEndpoint):
    """Completions of a text or of token ids."""

    path: ClassVar[str] = "/v1/completions"
    text_key: ClassVar[bytes] = b'"text":"'

    def fields(self, request: PerfRequest, history: History) -> dict[str, Any]:
        if request.messages is not None:
            raise PerfError("endpoint type 'completions' needs texts, not chat messages")
        prompt: Any = request.token_ids
        if prompt is None:
            text = require_text(request, "completions")
            prompt = f"{request.system}\n{text}" if request.system else text
        fields: dict[str, Any] = {"prompt": prompt}
        if request.max_tokens is not None:
            fields["max_tokens"] = request.max_tokens
        if request.min_tokens is not None:
            fields["min_tokens"] = request.min_tokens
        return fields

    def read_choices(self, record: RequestRecord, choices: list[dict[str, Any]], now: int) -> bool:
        text = choices[0].get("text")
        if not text:
            return False
        add_output(record, text, now)
        return True

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = _loads(body)
        raise_error(message)
        add_text(record, message["choices"][0]["text"])
        _add_response(record, message, now)


class ResponsesEndpoint(_OpenAIEndpoint):
    """The Responses API."""

    path: ClassVar[str] = "/v1/responses"

    def fields(self, request: PerfRequest, history: History) -> dict[str, Any]:
        given: Any = request.messages
        if given is None:
            text = require_text(request, "responses")
            given = [*history, self.message(request)] if history or request.images else text
        fields = {"input": given}
        if request.system:
            fields["instructions"] = request.system
        if request.max_tokens is not None:
            fields["max_output_tokens"] = request.max_tokens
        return fields

    def message(self, request: PerfRequest) -> dict[str, Any]:
        if not request.images:
            return {"role": "user", "content": request.text}
        parts: list[dict[str, Any]] = [{"type": "input_text", "text": request.text}]
        parts += [{"type": "input_image", "image_url": image} for image in request.images]
        return {"role": "user", "content": parts}

    def event(self, record: RequestRecord, data: bytes, now: int) -> None:
        event = _loads(data)
        kind = event["type"]
        if kind.endswith(".delta"):
            if "reasoning" in kind:
                record.arrivals_ns.append(now)
                add_text(record, event["delta"])
            else:
                add_output(record, event["delta"], now)
        elif kind in ("response.completed", "response.incomplete"):
            usage = event["response"].get("usage")
            if usage:
                set_usage(record, usage)
        elif kind in ("response.failed", "error"):
            raise ResponseError(
                str(event.get("message") or (event.get("response") or {}).get("error") or event)
            )

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = _loads(body)
        raise_error(message)
        for item in message["output"]:
            for part in item.get("content") or ():
                add_text(record, part.get("text") or "")
        _add_response(record, message, now)


class EmbeddingsEndpoint(_OpenAIEndpoint):
    """Embeddings of one or more texts per request."""

    path: ClassVar[str] = "/v1/embeddings"
    can_stream: ClassVar[bool] = False

    def fields(self, request: PerfRequest, history: History) -> dict[str, Any]:
        given: Any = request.token_ids if request.token_ids is not None else request.texts
        if given is None:
            given = require_text(request, "embeddings")
        return {"input": given}

    def items(self, request: PerfRequest) -> int:
        return len(request.texts or " ")

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = _loads(body)
        raise_error(message)
        if not message["data"]:
            raise ResponseError("the response has no embeddings")
        _add_response(record, message, now)


def _add_response(record: RequestRecord, message: dict[str, Any], now: int) -> None:
    add_output(record, "", now)
    usage = message.get("usage")
    if usage:
        set_usage(record, usage)
