"""Sampling of the next token of every sequence of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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
    uniforms = np.array([0.0 if state.params.greedy else state.uniform() for state in states])
    top_p = [state.top_p for state in states]
    return SamplingBatch.of([state.params for state in states], uniforms, masks, top_p)


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
        for state, token in zip(states, tokens, strict=True):
            if token != INVALID_TOKEN:
                state.record(token)
        return [
            SampledToken(token)
            if i not in raw or token == INVALID_TOKEN
            else scored(token, raw[i], state.params)
            for i, (state, token) in enumerate(zip(states, tokens, strict=True))
        ]


def scored(token: int, row: FloatRows, params: SamplingParams) -> SampledToken:
    """Return the token with its log probability and logits, if requested. `row`: the model's logits float32[V]."""
    logprobs = None
    if params.num_logprobs is not None:
        (logprobs,) = position_logprobs(row[None], [token], params.num_logprobs)
    return SampledToken(token, logprobs, row.tobytes() if params.return_generation_logits else b"")
