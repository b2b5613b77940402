"""Endpoints with one text in and one out: Triton's generate extension and Hugging Face's text-generation-inference."""

from __future__ import annotations

from typing import Any

import orjson

from neso.perf.endpoints.base import (
    History,
    HttpEndpoint,
    add_output,
    encode,
    raise_error,
    require_text,
)
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest


class TritonGenerateEndpoint(HttpEndpoint):
    """Triton's generate extension: `generate`, or `generate_stream` with streaming.

    `max_tokens` and `stream` are top-level fields, which is an input of TensorRT-LLM's ensemble and becomes a
    parameter of a vLLM model and of Neso's. Tokens are counted if responses have `num_output_tokens`.
    """

    def url_path(self, model: str) -> str:
        method = "generate_stream" if self.streaming else "generate"
        return self.options.path or f"/v2/models/{model}/{method}"

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        if request.payload is not None:
            return encode(request.payload, request)
        text = require_text(request, "generate")
        fields: dict[str, Any] = {"text_input": f"{request.system}\n{text}" if request.system else text}
        if request.max_tokens is not None:
            fields["max_tokens"] = request.max_tokens
        if request.min_tokens is not None:
            fields["min_tokens"] = request.min_tokens
        if self.streaming:
            fields["stream"] = True
        if request.adapter:
            fields["lora_name"] = request.adapter
        return encode(fields, request)

    def event(self, record: RequestRecord, data: bytes, now: int) -> None:
        message = orjson.loads(data)
        raise_error(message)
        text, tokens = message["text_output"], message.get("num_output_tokens")
        if text or tokens:
            add_output(record, text, now)
        if tokens:
            record.event_tokens.append(tokens)
            record.output_tokens = max(0, record.output_tokens) + tokens

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = orjson.loads(body)
        raise_error(message)
        text = message["text_output"]
        add_output(record, text if isinstance(text, str) else "".join(text), now)


class HuggingFaceGenerateEndpoint(HttpEndpoint):
    """text-generation-inference: POST to `/generate`, or `/generate_stream` with streaming."""

    def url_path(self, model: str) -> str:
        return self.options.path or ("/generate_stream" if self.streaming else "/generate")

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        if request.payload is not None:
            return encode(request.payload, request)
        parameters: dict[str, Any] = {"details": True}
        if request.max_tokens is not None:
            parameters["max_new_tokens"] = request.max_tokens
        if request.adapter:
            parameters["adapter_id"] = request.adapter
        return encode(
            {"inputs": require_text(request, "huggingface_generate"), "parameters": parameters}, request
        )

    def event(self, record: RequestRecord, data: bytes, now: int) -> None:
        message = orjson.loads(data)
        raise_error(message)
        token = message["token"]
        if not token.get("special"):
            add_output(record, token["text"], now)
        _take_details(record, message.get("details"))

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = orjson.loads(body)
        if isinstance(message, list):  # the pipeline's form
            message = message[0]
        raise_error(message)
        add_output(record, message["generated_text"], now)
        _take_details(record, message.get("details"))


def _take_details(record: RequestRecord, details: dict[str, Any] | None) -> None:
    if details:
        record.output_tokens = details.get("generated_tokens", record.output_tokens)
        record.input_tokens = details.get("input_length", record.input_tokens)
