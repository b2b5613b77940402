"""Writes what vLLM generated as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from neso.backends.vllm.tensor_request import TextRequest
from neso.server.tensor import DataType, Tensor

_LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; the same number as in vLLM's server."""


class ResponseTensors:
    """The responses to one request, of `n` sequences; each tensor has an element for each.

    An output of a stream tells only of sequences that have gone on: the others' texts are empty, and they have no new
    tokens.
    """

    def __init__(self, request: TextRequest, n: int) -> None:
        self._request = request
        self._n = n
        self._finish_reasons: list[str | None] = [None] * n
        self._cumulative = [0.0] * n

    def of(self, output: Any) -> list[Tensor]:
        """`text_output` and what was asked for, of a `RequestOutput`."""
        wanted, n = self._request.wanted, self._n
        new = {completion.index: completion for completion in output.outputs}
        prefix = self._request.prompt if self._request.prepend_prompt else ""
        texts = [prefix + new[i].text if i in new else prefix for i in range(n)]
        tensors = [Tensor.from_strings("text_output", texts)]
        if not wanted:
            return tensors
        for i, completion in new.items():
            self._finish_reasons[i] = completion.finish_reason or self._finish_reasons[i]
            if completion.cumulative_logprob is not None:
                self._cumulative[i] = completion.cumulative_logprob
        if "finish_reason" in wanted:
            # As in Triton, where a sequence that has not ended has the reason "None".
            tensors.append(Tensor.from_strings("finish_reason", list(map(str, self._finish_reasons))))
        if "cumulative_logprob" in wanted:
            values = np.array(self._cumulative, np.float32)
            tensors.append(Tensor("cumulative_logprob", DataType.FP32, values))
        if "logprobs" in wanted:
            written = [_as_json(new[i].logprobs if i in new else ()) for i in range(n)]
            tensors.append(Tensor.from_strings("logprobs", written))
        if "num_input_tokens" in wanted:
            tensors.append(_counts("num_input_tokens", [len(output.prompt_token_ids or ())]))
        if "num_output_tokens" in wanted:
            counts = [len(new[i].token_ids) if i in new else 0 for i in range(n)]
            tensors.append(_counts("num_output_tokens", counts))
        return tensors


def embedding_tensors(values: Sequence[float], num_tokens: int, wanted: frozenset[str]) -> list[Tensor]:
    """A vector, as JSON text in `text_output`."""
    tensors = [Tensor.from_strings("text_output", [orjson.dumps(list(values)).decode()])]
    if "num_input_tokens" in wanted:
        tensors.append(_counts("num_input_tokens", [num_tokens]))
    if "num_output_tokens" in wanted:
        tensors.append(_counts("num_output_tokens", [0]))
    return tensors


def _counts(name: str, counts: list[int]) -> Tensor:
    return Tensor(name, DataType.UINT32, np.array(counts, np.uint32))


def _as_json(logprobs: Sequence[Mapping[int, Any]] | None) -> str:
    """One object a position: token id → log probability, rank and text, of the sampled token and the top ones."""
    if logprobs is None:
        return "null"
    positions = [
        {
            str(token): {
                "logprob": max(entry.logprob, _LOWEST),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token, entry in position.items()
        }
        for position in logprobs
    ]
    return orjson.dumps(positions).decode()
