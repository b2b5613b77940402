"""`POST /v1/embeddings`, `/classify`, `/v1/score`, `/v1/rerank` and `/v1/ranking`."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import NotRequired, TypedDict

from neso.frontends.openai.errors import invalid, to_api_error
from neso.frontends.openai.model_resolver import ModelResolver, ResolvedPoolingModel
from neso.frontends.openai.request_params import MAX_PROMPTS
from neso.frontends.openai.routing import RequestContext, operation
from neso.frontends.openai.schemas import FailFastList, Integer, TokenIds, open_object
from neso.generation import InvalidParameter, PooledOutput, PoolingParams, PoolingRequest
from neso.generation.pooling import Float32Array, Scoring

_TAG = "Embeddings and scores"


class PoolingFields(BaseModel):
    """Fields shared by all pooling requests. A null field is the same as an omitted one."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str
    user: str | None = Field(None, description="Accepted, not used.")
    truncate_prompt_tokens: Integer | None = Field(
        None, description="Extension: maximum tokens per text; -1: the model's context length."
    )
    priority: Integer | None = Field(None, description="Extension: lower is scheduled first.")


class TextsRequest(PoolingFields):
    """A request with one or several texts."""

    input: Annotated[
        str | TokenIds | FailFastList[str] | FailFastList[TokenIds],
        Field(union_mode="left_to_right", description="One or several texts, as text or token ids."),
    ]
    add_special_tokens: bool | None = Field(
        None, description="Extension: add the tokenizer's special tokens."
    )


class EmbeddingRequest(TextsRequest):
    """The body of `POST /v1/embeddings`."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = Field(
        None, description="Truncate the embeddings, for models trained for it (Matryoshka)."
    )
    normalize: bool | None = Field(
        None, description="Extension: scale to unit length; default: the model's setting."
    )


class ClassifyRequest(TextsRequest):
    """The body of `POST /classify`, as of vLLM."""

    activation: bool | None = Field(None, description="Extension: false returns logits.")
    use_activation: bool | None = Field(None, description="vLLM's name of `activation`.")


class ScoreRequest(PoolingFields):
    """The body of `POST /v1/score`: a text and one or several others, or two lists of equal length."""

    text_1: str | FailFastList[str]
    text_2: str | FailFastList[str]
    activation: bool | None = Field(
        None, description="Extension: false returns the logits of a cross-encoder."
    )


class RerankDocument(BaseModel):
    """A text as an object, as clients of Jina, Cohere and NIM send it."""

    model_config = ConfigDict(extra="allow")

    text: str


class RerankRequest(PoolingFields):
    """The body of `POST /v1/rerank`."""

    query: str
    documents: FailFastList[str | RerankDocument] = Field(min_length=1)
    top_n: Annotated[Integer, Field(ge=0)] | None = Field(
        None, description="Number of documents to return; 0: all."
    )
    return_documents: bool | None = Field(None, description="Default: true.")


class RankingRequest(PoolingFields):
    """The body of `POST /v1/ranking`, as of NVIDIA NIM."""

    query: RerankDocument
    passages: FailFastList[RerankDocument] = Field(min_length=1)
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="END: cut texts at the model's context length; default: NONE, reject them."
    )


@open_object
class PoolingUsage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: None


@open_object
class EmbeddingObject(TypedDict):
    """The embedding of one text."""

    object: Literal["embedding"]
    index: int
    embedding: Annotated[list[float] | str, Field(description="Numbers, or little-endian float32 in base64.")]


@open_object
class EmbeddingResponse(TypedDict):
    """The response of `POST /v1/embeddings`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingObject]
    usage: PoolingUsage


@open_object
class ClassifiedText(TypedDict):
    """The classes of one text."""

    index: int
    label: Annotated[str, Field(description="The most probable class.")]
    probs: Annotated[list[float], Field(description="One probability per class; one for a reranker.")]
    num_classes: int


@open_object
class ClassifyResponse(TypedDict):
    """The response of `POST /classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedText]
    usage: PoolingUsage


@open_object
class ScoreObject(TypedDict):
    """The score of one pair of texts."""

    object: Literal["score"]
    index: int
    score: float


@open_object
class ScoreResponse(TypedDict):
    """The response of `POST /v1/score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: PoolingUsage


@open_object
class RerankResult(TypedDict):
    """The score of one document."""

    index: Annotated[int, Field(description="Index of the document in the request.")]
    relevance_score: float
    document: NotRequired[dict[str, Any]]


@open_object
class RerankResponse(TypedDict):
    """The response of `POST /v1/rerank`: documents in order of decreasing relevance."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]


@open_object
class Ranking(TypedDict):
    """The score of one passage, before the activation of a cross-encoder."""

    index: Annotated[int, Field(description="Index of the passage in the request.")]
    logit: float


@open_object
class RankingResponse(TypedDict):
    """The response of `POST /v1/ranking`: passages in order of decreasing relevance."""

    rankings: list[Ranking]
    usage: PoolingUsage


class PoolingApi:
    """Embeddings, and scores of text pairs by a cross-encoder or by cosine similarity."""

    def __init__(self, resolver: ModelResolver) -> None:
        self._resolver = resolver

    @operation(
        "POST",
        "/v1/embeddings",
        tag=_TAG,
        request=EmbeddingRequest,
        response=EmbeddingResponse,
        examples={"texts": {"model": "an-embedder", "input": ["One text.", "Another."]}},
        cancellable=True,
    )
    async def create_embeddings(
        self, request: EmbeddingRequest, context: RequestContext
    ) -> EmbeddingResponse:
        """Create embeddings."""
        model = self._resolver.find_pooling(request.model)
        params = PoolingParams(dimensions=request.dimensions, normalize=request.normalize)
        pooled = await _pool(model, request, params)
        as_base64 = request.encoding_format == "base64"
        return {
            "id": f"embd-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model,
            "data": [
                {"object": "embedding", "index": index, "embedding": _encode(output, as_base64=as_base64)}
                for index, output in enumerate(pooled)
            ],
            "usage": _usage(pooled),
        }

    @operation(
        "POST",
        "/classify",
        "/v1/classify",  # SGLang's path
        tag=_TAG,
        request=ClassifyRequest,
        response=ClassifyResponse,
        examples={"texts": {"model": "a-classifier", "input": ["One text.", "Another."]}},
        cancellable=True,
    )
    async def classify(self, request: ClassifyRequest, context: RequestContext) -> ClassifyResponse:
        """Classify texts."""
        model = self._resolver.find_pooling(request.model)
        activation = request.activation is not False and request.use_activation is not False
        pooled = await _pool(model, request, PoolingParams(task="classify", activation=activation))
        return {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model,
            "data": [
                {
                    "index": index,
                    "label": model.label(int(np.argmax(output.values))),
                    "probs": output.values.tolist(),
                    "num_classes": len(output.values),
                }
                for index, output in enumerate(pooled)
            ],
            "usage": _usage(pooled),
        }

    @operation(
        "POST",
        "/v1/score",
        "/score",
        tag=_TAG,
        request=ScoreRequest,
        response=ScoreResponse,
        examples={
            "one to many": {
                "model": "a-reranker",
                "text_1": "What is a GPU?",
                "text_2": ["A chip.", "A fish."],
            }
        },
        cancellable=True,
    )
    async def score(self, request: ScoreRequest, context: RequestContext) -> ScoreResponse:
        """Score pairs of texts."""
        scores, pooled = await self._scores(
            request, request.text_1, request.text_2, "text_2", activation=request.activation is not False
        )
        return {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model,
            "data": [
                {"object": "score", "index": index, "score": score}
                for index, score in enumerate(scores.tolist())
            ],
            "usage": _usage(pooled),
        }

    @operation(
        "POST",
        "/v1/rerank",
        "/v2/rerank",  # Cohere's path
        "/rerank",  # Jina's path
        tag=_TAG,
        request=RerankRequest,
        response=RerankResponse,
        examples={
            "three": {
                "model": "a-reranker",
                "query": "What is a GPU?",
                "documents": ["A chip.", "A fish.", "A bird."],
            }
        },
        cancellable=True,
    )
    async def rerank(self, request: RerankRequest, context: RequestContext) -> RerankResponse:
        """Rank documents by relevance to a query."""
        texts = [document if isinstance(document, str) else document.text for document in request.documents]
        scores, pooled = await self._scores(request, request.query, texts, "documents")
        results: list[RerankResult] = []
        for index in np.argsort(-scores, kind="stable").tolist()[: request.top_n or None]:
            result: RerankResult = {"index": index, "relevance_score": scores[index].item()}
            if request.return_documents is not False:
                result["document"] = {"text": texts[index]}
            results.append(result)
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": request.model,
            "usage": _usage(pooled),
            "results": results,
        }

    @operation(
        "POST",
        "/v1/ranking",
        tag=_TAG,
        request=RankingRequest,
        response=RankingResponse,
        examples={
            "two": {
                "model": "a-reranker",
                "query": {"text": "What is a GPU?"},
                "passages": [{"text": "A chip."}, {"text": "A fish."}],
            }
        },
        cancellable=True,
    )
    async def rank(self, request: RankingRequest, context: RequestContext) -> RankingResponse:
        """Rank passages by relevance to a query, as NVIDIA NIM does."""
        if request.truncate == "END":
            request.truncate_prompt_tokens = -1
        texts = [passage.text for passage in request.passages]
        scores, pooled = await self._scores(request, request.query.text, texts, "passages", activation=False)
        return {
            "rankings": [
                {"index": index, "logit": scores[index].item()}
                for index in np.argsort(-scores, kind="stable").tolist()
            ],
            "usage": _usage(pooled),
        }

    async def _scores(
        self,
        request: PoolingFields,
        queries: str | list[str],
        documents: str | list[str],
        field: str,
        *,
        activation: bool = True,
    ) -> tuple[Float32Array, list[PooledOutput]]:
        """Compute scores float32[pairs]; `field` is the request field of `documents`. Raises `ApiError`."""
        if not isinstance(documents, str) and not 0 < len(documents) <= MAX_PROMPTS:
            raise invalid(field, f"'{field}' must contain between 1 and {MAX_PROMPTS} texts.")
        model = self._resolver.find_pooling(request.model)
        try:
            scoring = Scoring.of(model.pooling_model.pooling, queries, documents, activation=activation)
            requests = [
                PoolingRequest(
                    prompt,
                    scoring.params,
                    priority=request.priority or 0,
                    truncate_prompt_tokens=request.truncate_prompt_tokens,
                )
                for prompt in scoring.prompts
            ]
            pooled = await model.pool(requests)
        except InvalidParameter as error:
            if error.field in ("prompt", "documents"):
                raise invalid(field, f"Invalid '{field}': {error.message}") from None
            raise to_api_error(error) from None
        return scoring.scores(pooled), pooled


async def _pool(
    model: ResolvedPoolingModel, request: TextsRequest, params: PoolingParams
) -> list[PooledOutput]:
    """Return the results of the texts. Raises `ApiError`."""
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
        return await model.pool(requests)
    except InvalidParameter as error:
        if error.field == "prompt":
            raise invalid("input", f"Invalid 'input': {error.message}") from None
        raise to_api_error(error) from None


def _inputs(request: TextsRequest) -> list[str | list[int]]:
    given = request.input
    inputs: list[Any]
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        inputs = [given]
    else:
        inputs = list(given)
    if not inputs or any(not text for text in inputs):
        raise invalid("input", "'input' must not be empty or contain empty items.")
    if len(inputs) > MAX_PROMPTS:
        raise invalid("input", f"'input' holds {len(inputs)} texts, at most {MAX_PROMPTS} are allowed.")
    return inputs


def _encode(output: PooledOutput, *, as_base64: bool) -> Any:
    """Return the embedding as base64, or as an array for the JSON encoder."""
    if as_base64:
        return base64.b64encode(output.values.astype("<f4").tobytes()).decode()
    return np.ascontiguousarray(output.values, np.float32)


def _usage(pooled: list[PooledOutput]) -> PoolingUsage:
    tokens = sum(output.num_prompt_tokens for output in pooled)
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
