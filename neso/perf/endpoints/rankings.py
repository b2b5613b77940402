"""Endpoints that rank passages by their relevance to a query."""

from __future__ import annotations

from typing import Any, ClassVar

import orjson

from neso.perf.endpoints.base import (
    History,
    HttpEndpoint,
    ResponseError,
    add_output,
    encode,
    raise_error,
    set_usage,
)
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest


class NimRankingsEndpoint(HttpEndpoint):
    """NVIDIA NIM: `/v1/ranking`."""

    path: ClassVar[str] = "/v1/ranking"
    can_stream: ClassVar[bool] = False
    results_key: ClassVar[str] = "rankings"

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        if request.payload is not None:
            return encode({"model": model, **request.payload}, request)
        if not request.passages:
            raise PerfError(
                f"endpoint type '{self.options.endpoint_type}' needs requests with a query and passages"
            )
        return encode(self.fields(request.query, request.passages, model), request)

    def fields(self, query: str, passages: list[str], model: str) -> dict[str, Any]:
        """Return the JSON fields of a request."""
        return {"model": model, "query": {"text": query}, "passages": [{"text": text} for text in passages]}

    def items(self, request: PerfRequest) -> int:
        return len(request.passages or " ")

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        message = orjson.loads(body)
        results = message
        if isinstance(message, dict):
            raise_error(message)
            results = message[self.results_key]
            if isinstance(message.get("usage"), dict):
                set_usage(record, message["usage"])
        if not results:
            raise ResponseError("the response has no ranks")
        add_output(record, "", now)


class CohereRankingsEndpoint(NimRankingsEndpoint):
    """Cohere's `/v2/rerank`, which vLLM and others serve too."""

    path: ClassVar[str] = "/v2/rerank"
    results_key: ClassVar[str] = "results"

    def fields(self, query: str, passages: list[str], model: str) -> dict[str, Any]:
        return {"model": model, "query": query, "documents": passages}


class TeiRankingsEndpoint(NimRankingsEndpoint):
    """Hugging Face's text-embeddings-inference: `/rerank`, whose response is a list."""

    path: ClassVar[str] = "/rerank"

    def fields(self, query: str, passages: list[str], model: str) -> dict[str, Any]:
        return {"query": query, "texts": passages}
