"""What a response of such a model says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from neso.generation import FinishReason, TokenLogprobs
from neso.server.errors import InternalError
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import Tensor

_GOES_ON = ("", "none", "null", "not_finished")
_REASONS = {
    "length": FinishReason.LENGTH,
    "max_tokens": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "cancelled": FinishReason.ABORT,
    "error": FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True)
class TextResponse:
    """One response. `text` is UTF-8, perhaps broken within a character; None of what it does not say."""

    text: bytes = b""
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    piece_logprobs: tuple[float, ...] = ()

    @classmethod
    def of(cls, response: InferenceResponse) -> TextResponse:
        """Raises `ServerError`: the response's own, or `InternalError` for outputs that cannot be read."""
        if response.error is not None:
            raise response.error
        outputs = {tensor.name: tensor for tensor in response.outputs}
        reason = _text(outputs.get("finish_reason")).decode("utf-8", "replace").lower()
        stop = _text(outputs.get("stop_reason")).decode("utf-8", "replace")
        return cls(
            _text(outputs.get("text_output")),
            None if reason in _GOES_ON else _REASONS.get(reason, FinishReason.STOP),
            None if stop.lower() in _GOES_ON else stop,
            _count(outputs.get("num_input_tokens")),
            _count(outputs.get("num_output_tokens")),
            _logprobs(outputs.get("logprobs")),
            _numbers(outputs.get("output_log_probs")),
        )


def _text(tensor: Tensor | None) -> bytes:
    if tensor is None or not tensor.array.size:
        return b""
    first = tensor.array.reshape(-1)[0]
    if not isinstance(first, bytes):
        raise InternalError(f"the model's output '{tensor.name}' holds no strings")
    return first


def _count(tensor: Tensor | None) -> int | None:
    if tensor is None or not tensor.array.size:
        return None
    return int(np.asarray(tensor.array).reshape(-1)[0])


def _numbers(tensor: Tensor | None) -> tuple[float, ...]:
    return () if tensor is None else tuple(np.asarray(tensor.array, np.float64).reshape(-1).tolist())


def _logprobs(tensor: Tensor | None) -> list[TokenLogprobs] | None:
    """A list of objects, token id to its log probability, rank and text; the token that was taken comes first."""
    text = _text(tensor)
    if not text:
        return None
    try:
        positions = orjson.loads(text)
        return [_position(position) for position in positions or ()]
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        raise InternalError(f"the model's output 'logprobs' cannot be read: {error!r}") from None


def _position(position: dict[str, dict[str, Any]]) -> TokenLogprobs:
    entries = [
        (
            int(token),
            float(entry["logprob"]),
            str(entry.get("decoded_token") or ""),
            int(entry.get("rank") or 0),
        )
        for token, entry in position.items()
    ]
    token_id, logprob, text, rank = next(iter(entries))
    top = sorted(((token, value, text) for token, value, text, _ in entries), key=lambda entry: -entry[1])
    return TokenLogprobs(token_id, text, logprob, rank, tuple(top))
