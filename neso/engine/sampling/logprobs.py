"""Log probabilities of tokens, and selection of the largest values without a full sort."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from neso.engine.core.request import PositionLogprobs

FloatRows = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]
Score = Callable[[FloatRows, Indices], FloatRows]
"""Computes scores of values float32[n, ...], where values[i] are from row rows[i]; monotonic in the values."""
_PER_GROUP = 64


def best_candidates(values: FloatRows, score: Score, count: int) -> tuple[Indices, Indices]:
    """Return rows and columns of the `count` best entries of float32[B, V], best first, without entries that score
    -inf.

    Ties are broken by position.
    """
    if count == 0:
        return np.empty(0, np.intp), np.empty(0, np.intp)
    rows, columns = _holding_best(values, score, count)
    scores = score(values[rows, columns][:, None], rows)[:, 0]
    order = np.lexsort((columns, rows, -scores))[:count]
    order = order[scores[order] > -np.inf]
    return rows[order], columns[order]


def _holding_best(values: FloatRows, score: Score, count: int) -> tuple[Indices, Indices]:
    """Return rows and columns that include the `count` best entries: those of the groups with the best maxima.

    A group has every num_groups-th column, so the maxima of all groups are computed side by side without branches. This
    takes a hundredth of the time of a partition.
    """
    num_rows, width = values.shape
    num_groups = width // _PER_GROUP
    if num_rows * num_groups <= 2 * count:
        rows, columns = np.divmod(np.arange(values.size), width)
        return rows, columns
    grouped = values[:, : num_groups * _PER_GROUP].reshape(num_rows, _PER_GROUP, num_groups)
    maxima = score(grouped.max(axis=1), np.arange(num_rows))
    # Include all groups whose maximum equals the threshold, so that ties are broken by position.
    edge = np.partition(maxima.reshape(-1), -count)[-count]
    rows, groups = np.nonzero(maxima >= edge)
    inside = groups[:, None] + num_groups * np.arange(_PER_GROUP)
    rest = np.arange(num_groups * _PER_GROUP, width)
    return (
        np.concatenate([np.repeat(rows, _PER_GROUP), np.repeat(np.arange(num_rows), len(rest))]),
        np.concatenate([inside.reshape(-1), np.tile(rest, num_rows)]),
    )


Row = npt.NDArray[np.float32]


def position_logprobs(
    logits: npt.NDArray[np.float32], token_ids: list[int], count: int
) -> list[PositionLogprobs]:
    """Return for each row of float32[R, V] the log probability and rank of token_ids[r], and the `count` best tokens.

    A count of -1 returns all tokens.
    """
    buffer = np.empty(logits.shape[1], np.float32)
    return [_scored(row, token, count, buffer) for row, token in zip(logits, token_ids, strict=True)]


def log_normalizer(row: Row, buffer: Row) -> tuple[np.float32, np.float32]:
    """Return the largest of the logits float32[V], and the logarithm of the sum of exponentials relative to it.

    A logit minus both is its log probability. If a logit is NaN, so is the second value. `buffer` float32[V] is
    overwritten; allocating memory would cost more than the exponentials.
    """
    highest: np.float32 = row.max()
    np.exp(np.subtract(row, highest, out=buffer), out=buffer)
    return highest, np.log(buffer.sum())


def _scored(row: Row, token_id: int, count: int, buffer: Row) -> PositionLogprobs:
    highest, log_mass = log_normalizer(row, buffer)
    own = row[token_id]
    _, best = best_candidates(row[None], lambda values, rows: values, len(row) if count < 0 else count)
    return PositionLogprobs(
        token_id=token_id,
        logprob=float(own - highest - log_mass),
        rank=int(np.count_nonzero(row > own)) + 1,
        top_ids=best.tolist(),
        top_logprobs=(row[best] - highest - log_mass).tolist(),
    )
