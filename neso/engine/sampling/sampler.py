"""Sampling of the next token of every sequence of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from neso.engine.core.request import PositionLogprobs
from neso.engine.sampling.adjustments import LogitAdjustments
from neso.engine.sampling.logprobs import position_logprobs
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import (
    INVALID_TOKEN,
    FloatRows,
    Int32Array,
    RowMasks,
    SamplingBatch,
    choose,
    probabilities_of,
)
from neso.engine.sampling.token_scores import ScoreRequest
from neso.generation.sampling_params import SamplingParams

if TYPE_CHECKING:
    from neso.engine.runners.base import LaunchedLogits, LaunchedTokens, Logits

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
        adjustments = LogitAdjustments.of(states)
        if adjustments is not None:
            if isinstance(logits, np.ndarray):
                adjustments.apply(logits)
            else:
                logits.adjust(adjustments)
        tokens = self._choose(logits, sampling_batch(states, masks)).tolist()
        sampled = []
        for i, (state, token) in enumerate(zip(states, tokens, strict=True)):
            if token == INVALID_TOKEN:
                sampled.append(SampledToken(token))
                continue
            if i in raw:
                drawn_from = masked_row(logits, i, masks) if state.params.normalize_logprobs else None
                sampled.append(scored(token, raw[i], state.params, drawn_from, state.top_p))
            else:
                sampled.append(SampledToken(token))
            state.record(token)
        return sampled


@dataclass(frozen=True, slots=True)
class LaunchedSampling:
    """Tokens that a device may still be sampling, one for each state."""

    states: list[SamplingState]
    tokens: LaunchedTokens
    wanted: ScoreRequest | None

    @classmethod
    def launch(
        cls, logits: LaunchedLogits, states: list[SamplingState], masks: RowMasks | None = None
    ) -> LaunchedSampling:
        """Start the sampling of a token for each state, as `Sampler.sample` does, without updating the states."""
        wanted = ScoreRequest.of(states)
        tokens = logits.sample(sampling_batch(states, masks), LogitAdjustments.of(states), wanted)
        return cls(states, tokens, wanted)

    def wait(self) -> list[SampledToken]:
        """Wait for the tokens, and return them. Raises the error of the step if it failed."""
        tokens = self.tokens.wait().tolist()
        sampled = [SampledToken(token) for token in tokens]
        scores = self.tokens.scores() if self.wanted is not None else None
        if self.wanted is None or scores is None:
            return sampled
        for i, row in enumerate(self.wanted.rows.tolist()):
            if tokens[row] != INVALID_TOKEN:
                count = self.states[row].params.num_logprobs or 0
                sampled[row] = SampledToken(tokens[row], scores.position(i, tokens[row], count))
        for i, row in enumerate(self.wanted.copied.tolist()):
            if tokens[row] != INVALID_TOKEN:
                state = self.states[row]
                drawn_from = scores.drawn_from[i] if self.wanted.drawn_from else None
                sampled[row] = scored(tokens[row], scores.logits[i], state.params, drawn_from, state.top_p)
        return sampled


def masked_row(logits: Logits, number: int, masks: RowMasks | None) -> FloatRows:
    """Return a copy of a row with its mask applied: float32[V]."""
    row = np.array(logits[number])
    if masks is not None:
        for index in np.flatnonzero(masks.rows == number):
            row[~masks.allowed(int(index), len(row))] = -np.inf
    return row


def scored(
    token: int,
    row: FloatRows,
    params: SamplingParams,
    drawn_from: FloatRows | None = None,
    top_p: float | None = None,
) -> SampledToken:
    """Return the token with its log probability and logits, if requested.

    - row: the model's logits float32[V]
    - drawn_from: the logits with penalties and masks applied, for `normalize_logprobs`
    - top_p: overrides the value in the parameters
    """
    logprobs = None
    if params.num_logprobs is not None:
        values = row
        if params.normalize_logprobs and drawn_from is not None:
            values = _normalized_logprobs(drawn_from, params, top_p)
        (logprobs,) = position_logprobs(values[None], [token], params.num_logprobs)
    return SampledToken(token, logprobs, row.tobytes() if params.return_generation_logits else b"")


def _normalized_logprobs(row: FloatRows, params: SamplingParams, top_p: float | None) -> FloatRows:
    """Return the log probabilities float32[V] of the distribution that a token is drawn from."""
    if params.greedy:
        certain = np.full(len(row), -np.inf, np.float32)
        certain[row.argmax()] = 0.0
        return certain
    with np.errstate(divide="ignore"):
        return np.log(probabilities_of(row, params, top_p)).astype(np.float32)
