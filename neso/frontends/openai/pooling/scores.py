"""`POST /v1/score` and `POST /v1/rerank`: how well texts go together."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.responses import Response

from neso.frontends.openai.errors import invalid, to_api_error
from neso.frontends.openai.models.targets import Targets
from neso.frontends.openai.pooling.answer import json_response, pooling_usage
from neso.frontends.openai.pooling.schemas import PoolingFields, RerankRequest, ScoreRequest, as_document
from neso.frontends.openai.requests.prompts import MAX_PROMPTS
from neso.generation import InvalidParameter, PooledOutput, PoolingRequest
from neso.generation.pooling import Float32Array, Scoring

if TYPE_CHECKING:
    from neso.server.tracing import Trace


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
