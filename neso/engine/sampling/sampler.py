"""Sampling of the next token of every sequence of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neso.engine.core.request import PositionLogprobs
from neso.engine.sampling.logprobs import position_logprobs
from neso.engine.sampling.state import SamplingState, adjust
from neso.engine.sampling.token_sampling import (
    INVALID_TOKEN,
    FloatRows,
    Int32Array,
    RowMasks,
    SamplingBatch,
    choose,
)
from neso.generation.sampling_params import SamplingParams

if TYPE_CHECKING:
    from neso.engine.runners.base import Logits

Choose = Callable[[Any, SamplingBatch], Int32Array]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`token_id` is INVALID_TOKEN if the logits contain NaN, or if no token is allowed.

    `logits`: bytes of the logits float32[V] from which the token was sampled, if requested.
    """

    token_id: int
    logprobs: PositionLogprobs | None = None
    logits: bytes = b""


def sampling_batch(states: list[SamplingState], masks: RowMasks | None = None) -> SamplingBatch:
    """Return the parameters for sampling the next token of each sequence.

    Draws a random number for each non-greedy sequence.
    """
    rows = [(s.temperature, s.top_k, s.top_p, s.min_p, s.uniform() if s.temperature else 0.0) for s in states]
    return SamplingBatch.of(rows, masks)


class Sampler:
    """Batched sampling. The token of a row depends only on its own logits and state, not on other rows.

    `choose` draws the tokens; it is implemented by the runner or in NumPy.
    """

    def __init__(self, choose: Choose = choose) -> None:
        self._choose = choose

    def sample(
        self, logits: Logits, states: list[SamplingState], masks: RowMasks | None = None
    ) -> list[SampledToken]:
        """Sample a token for each state from its row of float32[R, V] (which may be changed), and update the state."""
        scored_rows = [i for i, state in enumerate(states) if state.needs_scores]
        raw = dict(zip(scored_rows, logits[scored_rows], strict=True)) if scored_rows else {}
        for i, state in enumerate(states):
            if state.changes_logits:
                row = logits[i]
                adjust(row, state)
                logits[i] = row
        tokens = self._choose(logits, sampling_batch(states, masks)).tolist()
        sampled = []
        for i, (state, token) in enumerate(zip(states, tokens, strict=True)):
            if token == INVALID_TOKEN:
                sampled.append(SampledToken(token))
                continue
            state.record(token)
            sampled.append(scored(token, raw[i], state.params) if i in raw else SampledToken(token))
        return sampled


def scored(token: int, row: FloatRows, params: SamplingParams) -> SampledToken:
    """Return the token with its log probability and logits, if requested. `row`: the model's logits float32[V]."""
    logprobs = None
    if params.num_logprobs is not None:
        (logprobs,) = position_logprobs(row[None], [token], params.num_logprobs)
    return SampledToken(token, logprobs, row.tobytes() if params.return_generation_logits else b"")
