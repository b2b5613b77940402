"""What the answers of vectors and of scores have in common."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response

from neso.generation import PooledOutput


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
