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
    def _finished(self, fields: dict[str, Any], request: PerfRequest) -> bytes:
        """Add the fields of streams and return the JSON."""
        if self.streaming:
            fields["stream"] = True
            if self.options.usage:
                usage = {"include_usage": True}
                if self.options.per_chunk_usage:
                    usage["continuous_usage_stats"] = True
                fields["stream_options"] = usage
        return encode(fields, request)


class ChatEndpoint(_OpenAIEndpoint):
    """Chat completions, with images for vision models."""

    path: ClassVar[str] = "/v1/chat/completions"
    text_key: ClassVar[bytes] = b'"content":"'

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        if request.payload is not None:
            return self._finished({"model": request.adapter or model, **request.payload}, request)
        messages = request.messages
        if messages is None:
            require_text(request, "chat")
            messages = [*history, self.message(request)]
            if request.system:
                messages.insert(0, {"role": "system", "content": request.system})
        fields: dict[str, Any] = {"model": request.adapter or model, "messages": messages}
        if request.max_tokens is not None:
            name = "max_tokens" if self.options.legacy_max_tokens else "max_completion_tokens"
            fields[name] = request.max_tokens
        if request.min_tokens is not None:
            fields["min_tokens"] = request.min_tokens
        return self._finished(fields, request)

    def message(self, request: PerfRequest) -> dict[str, Any]:
        if not request.images:
            return {"role": "user", "content": request.text}
        parts: list[dict[str, Any]] = [{"type": "text", "text": request.text}]
        parts += [{"type": "image_url", "image_url": {"url": image}} for image in request.images]
        return {"role": "user", "content": parts}

    def event(self, record: RequestRecord, data: bytes, now: int) -> None:
        chunk = _loads(data)
        had_output = False
        choices = chunk.get("choices")
        if choices:
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
        elif "error" in chunk:
            raise_error(chunk)
        usage = chunk.get("usage")
        if usage:
            set_event_usage(record, usage, had_output)

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


class CompletionsEndpoint(_OpenAIEndpoint):
    """Completions of a text or of token ids."""

    path: ClassVar[str] = "/v1/completions"
    text_key: ClassVar[bytes] = b'"text":"'

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        if request.payload is not None:
            return self._finished({"model": request.adapter or model, **request.payload}, request)
        if request.messages is not None:
            raise PerfError("endpoint type 'completions' needs texts, not chat messages")
        prompt: Any = request.token_ids
        if prompt is None:
            text = require_text(request, "completions")
            prompt = f"{request.system}\n{text}" if request.system else text
        fields: dict[str, Any] = {"model": request.adapter or model, "prompt": prompt}
        if request.max_tokens is not None:
            fields["max_tokens"] = request.max_tokens
        if request.min_tokens is not None:
            fields["min_tokens"] = request.min_tokens
        return self._finished(fields, request)

    def event(self, record: RequestRecord, data: bytes, now: int) -> None:
        chunk = _loads(data)
        had_output = False
        choices = chunk.get("choices")
        if choices:
            text = choices[0].get("text")
            if text:
                add_output(record, text, now)
                had_output = True
        elif "error" in chunk:
            raise_error(chunk)
        usage = chunk.get("usage")
        if usage:
            set_event_usage(record, usage, had_output)

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = _loads(body)
        raise_error(message)
        add_text(record, message["choices"][0]["text"])
        _add_response(record, message, now)


class ResponsesEndpoint(_OpenAIEndpoint):
    """The Responses API."""

    path: ClassVar[str] = "/v1/responses"

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        if request.payload is not None:
            fields = {"model": request.adapter or model, **request.payload}
        else:
            given: Any = request.messages
            if given is None:
                text = require_text(request, "responses")
                given = [*history, self.message(request)] if history or request.images else text
            fields = {"model": request.adapter or model, "input": given}
            if request.system:
                fields["instructions"] = request.system
            if request.max_tokens is not None:
                fields["max_output_tokens"] = request.max_tokens
        if self.streaming:
            fields["stream"] = True
        return encode(fields, request)

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


class EmbeddingsEndpoint(HttpEndpoint):
    """Embeddings of one or more texts a request."""

    path: ClassVar[str] = "/v1/embeddings"
    can_stream: ClassVar[bool] = False

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        if request.payload is not None:
            return encode({"model": request.adapter or model, **request.payload}, request)
        given: Any = request.token_ids if request.token_ids is not None else request.texts
        if given is None:
            given = require_text(request, "embeddings")
        return encode({"model": request.adapter or model, "input": given}, request)

    def items(self, request: PerfRequest) -> int:
        return len(request.texts or " ")

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = _loads(body)
        raise_error(message)
        if not message["data"]:
            raise ResponseError("the response has no embeddings")
        _add_response(record, message, now)


def _add_response(record: RequestRecord, message: dict[str, Any], now: int) -> None:
    record.arrivals_ns.append(now)
    record.first_output_ns = now
    usage = message.get("usage")
    if usage:
        set_usage(record, usage)
