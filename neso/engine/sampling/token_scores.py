"""Log probabilities and logits of sampled tokens, computed for all rows of a step at once.

The numpy implementation is the reference of runners that compute them on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import PositionLogprobs
from neso.engine.sampling.adjustments import LogitAdjustments
from neso.engine.sampling.logprobs import position_logprobs
from neso.engine.sampling.state import SamplingState
from neso.engine.sampling.token_sampling import SamplingBatch, choose

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreRequest:
    """Rows that need more than a token.

    - rows int32[S]: the log probability of the token, and the `count` most likely tokens
    - copied int32[C]: all logits; `drawn_from`: also those after the adjustments and masks
    """

    rows: Int32Array
    count: int
    copied: Int32Array
    drawn_from: bool

    @classmethod
    def of(cls, states: Sequence[SamplingState]) -> ScoreRequest | None:
        """Return what the rows of these sequences need; None if only tokens."""
        rows, copied, count, drawn_from = [], [], 0, False
        for row, state in enumerate(states):
            if not state.needs_scores:
                continue
            params, wanted = state.params, state.params.num_logprobs
            drawn_from |= params.normalize_logprobs
            if params.return_generation_logits or params.normalize_logprobs or wanted is None or wanted < 0:
                copied.append(row)
            else:
                rows.append(row)
                count = max(count, wanted)
        if not rows and not copied:
            return None
        return cls(np.array(rows, np.int32), count, np.array(copied, np.int32), drawn_from)


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Results for the rows of a `ScoreRequest`.

    - logprobs float32[S], ranks int32[S]: of the sampled tokens
    - top_ids int32[S, K], top_logprobs float32[S, K]: the most likely tokens, best first, equal ones by token id;
      at the end may be tokens with a logit of -inf
    - logits float32[C, V]; drawn_from float32[C, V], or [0, V] if not requested
    """

    logprobs: Float32Array
    ranks: Int32Array
    top_ids: Int32Array
    top_logprobs: Float32Array
    logits: Float32Array
    drawn_from: Float32Array

    def position(self, index: int, token_id: int, count: int) -> PositionLogprobs:
        """Return the log probabilities of row `rows[index]`, with at most `count` most likely tokens."""
        likely = self.top_logprobs[index, :count]
        possible = int(np.count_nonzero(likely > -np.inf))
        return PositionLogprobs(
            token_id=token_id,
            logprob=float(self.logprobs[index]),
            rank=int(self.ranks[index]),
            top_ids=self.top_ids[index, :possible].tolist(),
            top_logprobs=likely[:possible].tolist(),
        )


def sample_and_score(
    logits: Float32Array,
    draws: SamplingBatch,
    adjustments: LogitAdjustments | None,
    wanted: ScoreRequest | None,
) -> tuple[Int32Array, TokenScores | None]:
    """Sample a token for each row of float32[R, V], which is changed; returns int32[R] and the requested scores."""
    raw = logits.copy() if wanted is not None else logits
    if adjustments is not None:
        adjustments.apply(logits)
    tokens = choose(logits, draws)
    if wanted is None:
        return tokens, None
    count = min(wanted.count, logits.shape[1])
    scored = position_logprobs(raw[wanted.rows], tokens[wanted.rows].tolist(), count)
    top_ids = np.zeros((len(scored), count), np.int32)
    top_logprobs = np.full((len(scored), count), -np.inf, np.float32)
    for i, position in enumerate(scored):
        top_ids[i, : len(position.top_ids)] = position.top_ids
        top_logprobs[i, : len(position.top_ids)] = position.top_logprobs
    return tokens, TokenScores(
        logprobs=np.array([position.logprob for position in scored], np.float32),
        ranks=np.array([position.rank for position in scored], np.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        logits=raw[wanted.copied],
        drawn_from=logits[wanted.copied] if wanted.drawn_from else logits[:0].copy(),
    )
