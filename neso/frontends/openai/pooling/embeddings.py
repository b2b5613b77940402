"""`POST /v1/embeddings`."""

from __future__ import annotations

import base64
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.responses import Response

from neso.frontends.openai.errors import invalid, to_api_error
from neso.frontends.openai.models.targets import Targets
from neso.frontends.openai.pooling.answer import json_response, pooling_usage
from neso.frontends.openai.pooling.schemas import EmbeddingRequest
from neso.frontends.openai.requests.prompts import MAX_PROMPTS
from neso.generation import InvalidParameter, PooledOutput, PoolingParams, PoolingRequest

if TYPE_CHECKING:
    from neso.server.tracing import Trace


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
