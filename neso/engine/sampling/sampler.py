"""Chooses the next token of every sequence of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import PositionLogprobs
from neso.engine.sampling.logprobs import position_logprobs
from neso.engine.sampling.penalties import adjust
from neso.engine.sampling.random_choice import BROKEN, Draws, Int32Array, choose
from neso.engine.sampling.state import SamplingState

Choose = Callable[[npt.NDArray[np.float32], Draws], Int32Array]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`token_id` is BROKEN when the logits were not numbers."""

    token_id: int
    logprobs: PositionLogprobs | None = None


class Sampler:
    """Batched sampling. What each row gets depends on its own logits and state only, not on its batch mates.

    `choose` draws the tokens: a runner's own, or numpy's.
    """

    def __init__(self, choose: Choose = choose) -> None:
        self._choose = choose

    def sample(self, logits: npt.NDArray[np.float32], states: list[SamplingState]) -> list[SampledToken]:
        """Choose one token for each row of float32[R, V] (changed in place) and count it in its state."""
        wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        raw = logits[wanted] if wanted else None
        for row, state in zip(logits, states, strict=True):
            if state.changes_logits:
                adjust(row, state)
        uniforms = np.array([0.0 if state.params.greedy else state.uniform() for state in states])
        tokens = self._choose(logits, Draws.of([state.params for state in states], uniforms)).tolist()
        logprobs = self._logprobs(raw, wanted, tokens, states) if raw is not None else {}
        for state, token in zip(states, tokens, strict=True):
            if token != BROKEN:
                state.record(token)
        return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens)]

    def _logprobs(
        self,
        raw: npt.NDArray[np.float32],
        wanted: list[int],
        tokens: list[int],
        states: list[SamplingState],
    ) -> dict[int, PositionLogprobs]:
        result = {}
        for row, i in zip(raw, wanted, strict=True):
            if tokens[i] != BROKEN:
                count = states[i].params.logprobs or 0
                (result[i],) = position_logprobs(row[None], [tokens[i]], count)
        return result
