"""Draws tokens from filtered distributions, all rows of a batch at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatRows = npt.NDArray[np.float32]

CANDIDATES = 256
"""Most likely tokens looked at first; a row whose top-p mass lies beyond them is sorted whole."""


def softmax(logits: FloatRows) -> FloatRows:
    """Softmax over the last axis of float32[R, V]."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]


def choose(probabilities: FloatRows, uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Index drawn from each row of float32[R, V] by the inverse of its distribution function at uniforms[R]."""
    cumulative = probabilities.astype(np.float64).cumsum(axis=-1)
    targets = uniforms * cumulative[:, -1]
    return np.array(
        [np.searchsorted(row, target, side="right") for row, target in zip(cumulative, targets, strict=True)]
    ).clip(max=probabilities.shape[-1] - 1)


def choose_filtered(
    probabilities: FloatRows,
    uniforms: npt.NDArray[np.float64],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Draw from each row of float32[R, V] what top-k, then top-p, then min-p leave of it.

    All parameters have shape [R]. top_k V, top_p 1, min_p 0 filter nothing. top_p keeps the smallest set of the
    most likely tokens whose mass reaches it (nucleus sampling, arXiv:1904.09751); min_p drops what is less likely
    than that share of the most likely token (arXiv:2407.01082).
    """
    chosen = np.empty(len(probabilities), np.int64)
    ids, sorted_probabilities = _most_likely(probabilities, CANDIDATES)
    # Without top-k, the candidates are enough when they reach top-p, or when min-p drops all that come after.
    reach_top_p = (top_p < 1.0) & (sorted_probabilities.sum(axis=1, dtype=np.float64) >= top_p)
    reach_min_p = sorted_probabilities[:, -1] < min_p * sorted_probabilities[:, 0]
    no_top_k = top_k >= probabilities.shape[1]
    enough = (top_k <= ids.shape[1]) | (no_top_k & (reach_top_p | reach_min_p))
    for rows, whole in ((np.flatnonzero(enough), False), (np.flatnonzero(~enough), True)):
        if not len(rows):
            continue
        row_ids, row_probabilities = (
            _most_likely(probabilities[rows], probabilities.shape[1])
            if whole
            else (ids[rows], sorted_probabilities[rows])
        )
        kept = _filter(row_probabilities, top_k[rows], top_p[rows], min_p[rows])
        position = choose(kept, uniforms[rows])
        chosen[rows] = row_ids[np.arange(len(rows)), position]
    return chosen


def _most_likely(probabilities: FloatRows, count: int) -> tuple[npt.NDArray[np.int64], FloatRows]:
    """Ids and probabilities of the `count` most likely tokens of each row, sorted; ties by id."""
    if count < probabilities.shape[1]:
        ids = np.argpartition(probabilities, -count, axis=1)[:, -count:]
        ids.sort(axis=1)
    else:
        ids = np.broadcast_to(np.arange(probabilities.shape[1]), probabilities.shape)
    values = np.take_along_axis(probabilities, ids, axis=1)
    order = np.argsort(-values, axis=1, kind="stable")
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(values, order, axis=1)


def _filter(
    probabilities: FloatRows,
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float64],
    min_p: npt.NDArray[np.float64],
) -> FloatRows:
    """Zero what the filters drop from rows sorted by probability; the most likely token always stays."""
    rank = np.arange(probabilities.shape[1])
    in_top_k = rank < top_k[:, None]
    mass = np.where(in_top_k, probabilities, 0).cumsum(axis=1, dtype=np.float64)
    total = np.where(top_k[:, None] <= len(rank), mass[:, -1:], 1.0)
    # Mass before a token, of what top-k left: below top_p, the token is still needed to reach it. A top_p of 1
    # keeps all, whatever rounding says of the sum.
    before = mass - probabilities
    in_top_p = (before < top_p[:, None] * total) | (top_p[:, None] >= 1.0)
    in_min_p = probabilities >= min_p[:, None] * probabilities[:, :1]
    keep = in_top_k & in_top_p & in_min_p
    keep[:, 0] = True
    return np.where(keep, probabilities, np.float32(0))
