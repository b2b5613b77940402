"""Endpoint type of `neso perf` for TensorRT-LLM's model `tensorrt_llm` on Triton's generate extension.

Name it as `--endpoint-type token_ids_endpoint:TokenIdsEndpoint`, in this folder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson

from neso.perf.endpoints.base import History, add_output, encode, raise_error
from neso.perf.endpoints.generate import TritonGenerateEndpoint
from neso.perf.errors import PerfError
from neso.perf.records import RequestRecord
from neso.perf.requests import PerfRequest


class TokenIdsEndpoint(TritonGenerateEndpoint):
    """Sends prompts as token ids and counts the token ids of responses."""

    def body(self, request: PerfRequest, model: str, history: History) -> bytes:
        if request.token_ids is None or request.max_tokens is None:
            raise PerfError("requests need token ids and an output length")
        fields: dict[str, Any] = {
            "input_ids": request.token_ids,
            "input_lengths": len(request.token_ids),
            "request_output_len": request.max_tokens,
            "streaming": self.streaming,
        }
        return encode(fields, request)

    def event(self, record: RequestRecord, data: bytes, now: int) -> None:
        message = orjson.loads(data)
        raise_error(message)
        if tokens := int(np.size(message["output_ids"])):
            add_output(record, "", now)
            record.event_tokens.append(tokens)
            record.output_tokens = max(0, record.output_tokens) + tokens

    def response(self, record: RequestRecord, body: bytes, now: int) -> None:
        self.event(record, body, now)
