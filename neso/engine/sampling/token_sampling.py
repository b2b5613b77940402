"""Draws tokens from filtered distributions for all rows of a batch.

This is the reference implementation of each runner's `choose`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.generation.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """Masks of some rows: in row rows[i], token t is allowed if bit t % 32 of bits[i, t // 32] is set.

    rows int32[G], bits int32[G, W] in C order, with at least one bit per token.
    """

    rows: Int32Array
    bits: Int32Array

    def allowed(self, index: int, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Return the tokens that are allowed in row rows[index], bool[vocab_size]."""
        return np.unpackbits(self.bits[index].view(np.uint8), count=vocab_size, bitorder="little").view(
            np.bool_
        )

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Set the logits float32[R, V] of tokens that are not allowed to -inf, in place."""
        for index, row in enumerate(self.rows):
            np.copyto(logits[row], np.float32(-np.inf), where=~self.allowed(index, logits.shape[1]))


FloatRows = npt.NDArray[np.float32]
INVALID_TOKEN = -1
"""The token of a row whose logits contain NaN, or only -inf."""


SamplingRow = tuple[float, int, float, float, float]
"""temperature, top_k, top_p, min_p and random number of a row; see `SamplingBatch`."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """Parameters for sampling a token from each of R rows; all arrays have shape [R].

    A temperature of 0 selects the largest logit. top_k 0, top_p 1 and min_p 0 disable these filters. `uniforms`: random
    numbers in [0, 1). `masks` are applied first: logits of disallowed tokens count as -inf.
    """

    temperature: FloatRows
    top_k: Int32Array
    top_p: FloatRows
    min_p: FloatRows
    uniforms: npt.NDArray[np.float64]
    masks: RowMasks | None = None

    @classmethod
    def of(cls, rows: list[SamplingRow], masks: RowMasks | None = None) -> SamplingBatch:
        columns = np.array(rows, np.float64).reshape(-1, 5).T
        return cls(
            temperature=columns[0].astype(np.float32),
            top_k=columns[1].astype(np.int32),
            top_p=columns[2].astype(np.float32),
            min_p=columns[3].astype(np.float32),
            uniforms=columns[4].copy(),
            masks=masks,
        )

    def __len__(self) -> int:
        return len(self.uniforms)

    def rows(self, wanted: npt.NDArray[np.intp]) -> SamplingBatch:
        """Return the parameters of some rows, without masks."""
        return SamplingBatch(
            self.temperature[wanted],
            self.top_k[wanted],
            self.top_p[wanted],
            self.min_p[wanted],
            self.uniforms[wanted],
        )


def choose(logits: FloatRows, batch: SamplingBatch) -> Int32Array:
    """Draw a token for each row of float32[R, V]; returns int32[R], INVALID_TOKEN if none is possible.

    Masks change the logits in place.
    """
    if batch.masks is not None:
        batch.masks.apply(logits)
    tokens: Int32Array = logits.argmax(axis=1).astype(np.int32)
    # argmax of a row with NaN returns the NaN's index, so the chosen logit shows whether the row is invalid.
    broken = ~(logits[np.arange(len(tokens)), tokens] > -np.inf)
    random = np.flatnonzero((batch.temperature > 0) & ~broken)
    if len(random):
        chosen = batch.rows(random)
        weights = exponentials(logits[random], chosen.temperature)
        kept = filter_weights(weights, chosen.top_k, chosen.top_p, chosen.min_p)
        tokens[random] = draw(kept, chosen.uniforms)
    tokens[broken] = INVALID_TOKEN
    return tokens


def exponentials(logits: FloatRows, temperature: FloatRows) -> FloatRows:
    """Return the probabilities relative to the most likely token, float32[R, V]."""
    shifted = (logits - logits.max(axis=1, keepdims=True)) * (np.float32(1) / temperature)[:, None]
    weights: FloatRows = np.exp(shifted)
    return weights


def draw(weights: FloatRows, uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Draw an index from each row of weights float32[R, V] by inverse transform sampling with uniforms[R]."""
    cumulative = weights.astype(np.float64).cumsum(axis=-1)
    targets = uniforms * cumulative[:, -1]
    return np.array(
        [np.searchsorted(row, target, side="right") for row, target in zip(cumulative, targets, strict=True)]
    ).clip(max=weights.shape[-1] - 1)


def filter_weights(weights: FloatRows, top_k: Int32Array, top_p: FloatRows, min_p: FloatRows) -> FloatRows:
    """Set the weights of tokens excluded by top-k, then top-p, then min-p to 0, in float32[R, V].

    top_p keeps the smallest set of the most likely tokens whose mass reaches it (nucleus sampling, arXiv:1904.09751);
    min_p drops tokens less likely than this fraction of the most likely token (arXiv:2407.01082). Ties are broken by
    position; the most likely token is always kept.
    """
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return weights
    vocab = weights.shape[1]
    order = np.argsort(-weights, axis=1, kind="stable")
    ordered = np.take_along_axis(weights, order, axis=1)
    in_top_k = np.arange(vocab) < np.where(top_k > 0, top_k, vocab)[:, None]
    mass = np.where(in_top_k, ordered, 0).cumsum(axis=1, dtype=np.float64)
    # A token is kept if the mass before it is below top_p. A top_p of 1 keeps all tokens, despite rounding of the sum.
    before = mass - ordered
    in_top_p = (before < top_p[:, None].astype(np.float64) * mass[:, -1:]) | (top_p[:, None] >= 1)
    in_min_p = ordered >= min_p[:, None] * ordered[:, :1]
    keep = in_top_k & in_top_p & in_min_p
    keep[:, 0] = True
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, np.where(keep, ordered, np.float32(0)), axis=1)
    return kept


def probabilities_of(
    logits: npt.NDArray[np.float32], params: SamplingParams, top_p: float | None = None
) -> npt.NDArray[np.float64]:
    """Return the distribution from which `token_sampling.choose` draws for a row float32[V]: float64[V] with sum 1.

    `top_p` overrides the value in the parameters. Greedy requests get the distribution at temperature 1.
    """
    temperature = 1.0 if params.greedy else params.temperature
    row = (temperature, max(params.top_k, 0), params.top_p if top_p is None else top_p, params.min_p, 0.0)
    batch = SamplingBatch.of([row])
    weights = exponentials(logits[None], batch.temperature)
    kept = filter_weights(weights, batch.top_k, batch.top_p, batch.min_p)[0].astype(np.float64)
    normalized: npt.NDArray[np.float64] = kept / kept.sum()
    return normalized
