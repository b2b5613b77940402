"""`POST /v1/score` and `POST /v1/rerank`: how well texts go together."""

from __future__ import annotations

import base64
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from neso.frontends.openai.errors import invalid, to_api_error
from neso.frontends.openai.model_resolver import Targets
from neso.frontends.openai.request_params import MAX_PROMPTS
from neso.frontends.openai.schemas import Integer, TokenIds
from neso.generation import InvalidParameter, PooledOutput, PoolingParams, PoolingRequest
from neso.generation.pooling import Float32Array, Scoring

if TYPE_CHECKING:
    from neso.server.tracing import Trace


class PoolingFields(BaseModel):
    """What all of them have in common. A field that is null is as one left out."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    user: str | None = Field(None, description="Accepted, not used.")
    truncate_prompt_tokens: Integer | None = Field(
        None, description="Extension: keep so many tokens; -1: as many as the model takes."
    )
    priority: Integer | None = Field(None, description="Extension: lower is served first.")


class EmbeddingRequest(PoolingFields):
    """The body of `POST /v1/embeddings`."""

    input: Annotated[
        str | TokenIds | list[str] | list[TokenIds],
        Field(union_mode="left_to_right", description="One text or several, as text or as token ids."),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = Field(
        None, description="Only the first so many, for models trained for that."
    )
    normalize: bool | None = Field(
        None, description="Extension: to length 1; what the model says unless given."
    )
    add_special_tokens: bool | None = Field(None, description="Extension: those of the tokenizer.")


class ScoreRequest(PoolingFields):
    """The body of `POST /v1/score`: one text against one or several, or pairs of two lists of one length."""

    text_1: str | list[str]
    text_2: str | list[str]
    activation: bool | None = Field(None, description="Extension: false gives logits of a cross-encoder.")


class Document(BaseModel):
    """A document as Jina's and Cohere's clients may write it."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankRequest(PoolingFields):
    """The body of `POST /v1/rerank`."""

    query: str
    documents: list[str | Document] = Field(min_length=1)
    top_n: Annotated[Integer, Field(ge=0)] | None = Field(None, description="The best so many; 0 is all.")
    return_documents: bool | None = Field(None, description="True unless given.")

    @property
    def texts(self) -> list[str]:
        """The documents as texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


def as_document(text: str) -> dict[str, Any]:
    """A document as answers give it back."""
    return {"text": text}


def pooling_usage(pooled: list[PooledOutput]) -> dict[str, Any]:
    """OpenAI's usage object."""
    tokens = sum(output.num_prompt_tokens for output in pooled)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }


def json_response(body: dict[str, Any]) -> Response:
    """An object that may hold numpy arrays."""
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


class EmbeddingsApi:
    """Embeds texts."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets

    async def create(self, request: EmbeddingRequest, trace: Trace | None = None) -> Response:
        """The response. Raises `ApiError` and what the core raises."""
        target = self._targets.find_pooling(request.model)
        params = PoolingParams(dimensions=request.dimensions, normalize=request.normalize)
        requests = [
            PoolingRequest(
                prompt,
                params,
                priority=request.priority or 0,
                add_special_tokens=request.add_special_tokens is not False,
                truncate_prompt_tokens=request.truncate_prompt_tokens,
            )
            for prompt in _inputs(request)
        ]
        try:
            pooled = await target.pool(requests)
        except InvalidParameter as error:
            if error.field == "prompt":  # which is the client's input
                raise invalid("input", f"Invalid 'input': {error.message}") from None
            raise to_api_error(error) from None
        as_base64 = request.encoding_format == "base64"
        body = {
            "id": f"embd-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _encoded(output, as_base64=as_base64)}
                for index, output in enumerate(pooled)
            ],
            "usage": pooling_usage(pooled),
        }
        return json_response(body)


def _inputs(request: EmbeddingRequest) -> list[str | list[int]]:
    given = request.input
    inputs: list[Any]
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        inputs = [given]
    else:
        inputs = list(given)
    if not inputs or any(not text for text in inputs):
        raise invalid("input", "'input' must not be empty, nor hold anything empty.")
    if len(inputs) > MAX_PROMPTS:
        raise invalid("input", f"'input' holds {len(inputs)} texts, at most {MAX_PROMPTS} are allowed.")
    return inputs


def _encoded(output: PooledOutput, *, as_base64: bool) -> Any:
    """float32, little-endian, as the client's base64; else numbers."""
    if as_base64:
        return base64.b64encode(output.values.astype("<f4").tobytes()).decode()
    return np.ascontiguousarray(output.values, np.float32)


class ScoresApi:
    """Scores pairs, by a cross-encoder or by the cosine of embeddings."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets

    async def score(self, request: ScoreRequest, trace: Trace | None = None) -> Response:
        """The response. Raises `ApiError` and what the core raises."""
        scores, pooled = await self._scores(
            request, request.text_1, request.text_2, "text_2", activation=request.activation is not False
        )
        data = [
            {"object": "score", "index": index, "score": score} for index, score in enumerate(scores.tolist())
        ]
        body = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model,
            "data": data,
            "usage": pooling_usage(pooled),
        }
        return json_response(body)

    async def rerank(self, request: RerankRequest, trace: Trace | None = None) -> Response:
        """The response: the documents, best first. Raises as `score`."""
        texts = request.texts
        scores, pooled = await self._scores(request, request.query, texts, "documents")
        order = np.argsort(-scores, kind="stable").tolist()
        results = []
        for index in order[: request.top_n or None]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index].item()}
            if request.return_documents is not False:
                result["document"] = as_document(texts[index])
            results.append(result)
        body = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": request.model,
            "usage": pooling_usage(pooled),
            "results": results,
        }
        return json_response(body)

    async def _scores(
        self,
        request: PoolingFields,
        queries: str | list[str],
        documents: str | list[str],
        field: str,
        *,
        activation: bool = True,
    ) -> tuple[Float32Array, list[PooledOutput]]:
        if not isinstance(documents, str) and not 0 < len(documents) <= MAX_PROMPTS:
            raise invalid(field, f"'{field}' must hold between 1 and {MAX_PROMPTS} texts.")
        target = self._targets.find_pooling(request.model)
        try:
            scoring = Scoring.of(target.pooling_model.pooling, queries, documents, activation=activation)
            requests = [
                PoolingRequest(
                    prompt,
                    scoring.params,
                    priority=request.priority or 0,
                    truncate_prompt_tokens=request.truncate_prompt_tokens,
                )
                for prompt in scoring.prompts
            ]
            pooled = await target.pool(requests)
        except InvalidParameter as error:
            if error.field in ("prompt", "documents"):
                raise invalid(field, f"Invalid '{field}': {error.message}") from None
            raise to_api_error(error) from None
        return scoring.scores(pooled), pooled
