"""Chooses the next token of every sequence of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import PositionLogprobs
from neso.engine.sampling.logprobs import position_logprobs
from neso.engine.sampling.penalties import adjust
from neso.engine.sampling.random_choice import choose, choose_filtered, softmax
from neso.engine.sampling.state import SamplingState

BROKEN = -1
"""The token id of a row whose logits hold NaN: the model's answer is worthless, and so is any choice."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`token_id` is BROKEN when the logits were not numbers."""

    token_id: int
    logprobs: PositionLogprobs | None = None


class Sampler:
    """Batched sampling. What each row gets depends on its own logits and state only, not on its batch mates."""

    def sample(self, logits: npt.NDArray[np.float32], states: list[SamplingState]) -> list[SampledToken]:
        """Choose one token for each row of float32[R, V] (changed in place) and count it in its state."""
        wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        raw = logits[wanted] if wanted else None
        for row, state in zip(logits, states, strict=True):
            if state.changes_logits:
                adjust(row, state)
        tokens = self._choose(logits, states)
        broken = np.isnan(logits[np.arange(len(tokens)), tokens])
        tokens[broken] = BROKEN
        logprobs = self._logprobs(raw, wanted, tokens, states) if raw is not None else {}
        for state, token in zip(states, tokens.tolist(), strict=True):
            if token != BROKEN:
                state.record(token)
        return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens.tolist())]

    def _choose(self, logits: npt.NDArray[np.float32], states: list[SamplingState]) -> npt.NDArray[np.int64]:
        tokens: npt.NDArray[np.int64] = logits.argmax(axis=1)
        # argmax of a row with NaN is the NaN, so such a row is recognised by its token, and must not be drawn from.
        healthy = ~np.isnan(logits[np.arange(len(tokens)), tokens])
        random = [i for i, state in enumerate(states) if not state.params.greedy and healthy[i]]
        if not random:
            return tokens
        temperatures = np.array([states[i].params.temperature for i in random], np.float32)
        probabilities = softmax(logits[random] / temperatures[:, None])
        uniforms = np.array([states[i].generator.random() for i in random])
        filtered = np.array([_filters(states[i]) for i in random])
        rows = np.array(random)
        if not filtered.all():
            tokens[rows[~filtered]] = choose(probabilities[~filtered], uniforms[~filtered])
        if filtered.any():
            params = [states[i].params for i in rows[filtered]]
            vocab = logits.shape[1]
            tokens[rows[filtered]] = choose_filtered(
                probabilities[filtered],
                uniforms[filtered],
                top_k=np.array([p.top_k if p.top_k > 0 else vocab for p in params]),
                top_p=np.array([p.top_p for p in params]),
                min_p=np.array([p.min_p for p in params]),
            )
        return tokens

    def _logprobs(
        self,
        raw: npt.NDArray[np.float32],
        wanted: list[int],
        tokens: npt.NDArray[np.int64],
        states: list[SamplingState],
    ) -> dict[int, PositionLogprobs]:
        result = {}
        for row, i in zip(raw, wanted, strict=True):
            if tokens[i] != BROKEN:
                count = states[i].params.logprobs or 0
                (result[i],) = position_logprobs(row[None], [int(tokens[i])], count)
        return result


def _filters(state: SamplingState) -> bool:
    params = state.params
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
