"""Changes of the logits before sampling: penalties, biases, allowed and banned tokens, for all rows of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.engine.sampling.state import SamplingState

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Places in logits[R, V]: rows int32[N] and tokens int32[N], each place once."""

    rows: Int32Array
    tokens: Int32Array

    @classmethod
    def of(cls, parts: list[tuple[int, TokenIds]]) -> Cells:
        """Create from rows, each with its tokens."""
        rows = np.array([row for row, _ in parts], np.int32)
        lengths = [len(tokens) for _, tokens in parts]
        tokens = [tokens for _, tokens in parts]
        return cls(np.repeat(rows, lengths), np.concatenate([_NO_IDS, *tokens]).astype(np.int32))

    def __len__(self) -> int:
        return len(self.rows)


_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class LogitAdjustments:
    """The changes, in the order of the fields.

    - penalized: positive logits are divided by factors[i], negative ones multiplied (repetition penalty, CTRL,
      arXiv:1909.05858, section 4.1); then subtracted[i] is subtracted (OpenAI's presence and frequency penalties)
    - dense_rows int32[D]: dense_biases float32[D, V] are added
    - biased: biases[i] are added
    - allowed: the only tokens of their rows that are not set to -inf
    - banned: set to -inf
    """

    penalized: Cells
    factors: Float32Array
    subtracted: Float32Array
    dense_rows: Int32Array
    dense_biases: Float32Array
    biased: Cells
    biases: Float32Array
    allowed: Cells
    banned: Cells

    @classmethod
    def of(cls, states: Iterable[SamplingState]) -> LogitAdjustments | None:
        """Return the changes for row i of the i-th state; None if there are none."""
        changed = [(row, state) for row, state in enumerate(states) if state.changes_logits]
        if not changed:
            return None
        penalized: list[tuple[int, TokenIds]] = []
        biased: list[tuple[int, TokenIds]] = []
        allowed: list[tuple[int, TokenIds]] = []
        banned: list[tuple[int, TokenIds]] = []
        factors, subtracted, biases = [_NO_VALUES], [_NO_VALUES], [_NO_VALUES]
        dense = [(row, state.dense_bias) for row, state in changed if state.dense_bias is not None]
        for row, state in changed:
            params, bans = state.params, state.bans
            if state.counts_tokens:
                tokens, counts = state.penalized_tokens()
                penalized.append((row, tokens))
                factors.append(np.full(len(tokens), params.repetition_penalty, np.float32))
                penalty = params.presence_penalty + params.frequency_penalty * counts
                subtracted.append(np.where(counts > 0, penalty, np.float32(0)))
            if params.logit_bias:
                biased.append((row, np.fromiter(params.logit_bias, np.int32, len(params.logit_bias))))
                biases.append(np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias)))
            if state.suppressed_ids and state.num_output_tokens < params.min_tokens:
                banned.append((row, np.array(state.suppressed_ids, np.int32)))
            if bans is not None:
                if bans.allowed is not None:
                    allowed.append((row, bans.allowed))
                banned.append((row, bans.banned()))
        return cls(
            penalized=Cells.of(penalized),
            factors=np.concatenate(factors),
            subtracted=np.concatenate(subtracted),
            dense_rows=np.array([row for row, _ in dense], np.int32),
            dense_biases=np.stack([bias for _, bias in dense]) if dense else np.empty((0, 0), np.float32),
            biased=Cells.of(biased),
            biases=np.concatenate(biases),
            allowed=Cells.of(allowed),
            banned=Cells.of(banned),
        )

    def apply(self, logits: Float32Array) -> None:
        """Change logits float32[R, V] in place."""
        if len(self.penalized):
            cells = self.penalized.rows, self.penalized.tokens
            values = logits[cells]
            scaled = np.where(values > 0, values / self.factors, values * self.factors)
            logits[cells] = scaled - self.subtracted
        if len(self.dense_rows):
            logits[self.dense_rows] += self.dense_biases
        if len(self.biased):
            logits[self.biased.rows, self.biased.tokens] += self.biases
        if len(self.allowed):
            kept = logits[self.allowed.rows, self.allowed.tokens]
            logits[np.unique(self.allowed.rows)] = -np.inf
            logits[self.allowed.rows, self.allowed.tokens] = kept
        if len(self.banned):
            logits[self.banned.rows, self.banned.tokens] = -np.inf


def adjust(row: Float32Array, state: SamplingState) -> None:
    """Change the logits float32[V] of one sequence in place."""
    adjustments = LogitAdjustments.of([state])
    if adjustments is not None:
        adjustments.apply(row[None])
