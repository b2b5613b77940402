"""SamplingBatch tokens from filtered distributions for all rows of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from neso.generation.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RowMasks:
    """In row rows[i], token t may be chosen if bit t % 32 of bits[i, t // 32] is set; other rows are free.

    rows int32[G], bits int32[G, W] in C order, with at least a bit for each token.
    """

    rows: Int32Array
    bits: Int32Array

    def allowed(self, index: int, vocab_size: int) -> npt.NDArray[np.bool_]:
        """What row rows[index] may choose, bool[vocab_size]."""
        return np.unpackbits(self.bits[index].view(np.uint8), count=vocab_size, bitorder="little").view(
            np.bool_
        )

    def apply(self, logits: npt.NDArray[np.float32]) -> None:
        """Set what may not be chosen to -inf in float32[R, V], in place."""
        for index, row in enumerate(self.rows):
            np.copyto(logits[row], np.float32(-np.inf), where=~self.allowed(index, logits.shape[1]))


FloatRows = npt.NDArray[np.float32]
INVALID_TOKEN = -1
"""The token of a row whose logits hold NaN, or -inf alone: no choice is right, or none is left."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingBatch:
    """How to choose a token from each of R rows; all arrays have shape [R].

    temperature 0 takes the largest logit. top_k 0, top_p 1 and min_p 0 filter nothing. uniforms in [0, 1) decide.
    `masks` come before all that: what they keep out is as if its logit were -inf.
    """

    temperature: FloatRows
    top_k: Int32Array
    top_p: FloatRows
    min_p: FloatRows
    uniforms: npt.NDArray[np.float64]
    masks: RowMasks | None = None

    @classmethod
    def of(
        cls,
        params: list[SamplingParams],
        uniforms: npt.NDArray[np.float64],
        masks: RowMasks | None = None,
        top_p: list[float] | None = None,
    ) -> SamplingBatch:
        """`top_p`: in place of those that the parameters begin with."""
        return cls(
            temperature=np.array([0.0 if p.greedy else p.temperature for p in params], np.float32),
            top_k=np.array([max(p.top_k, 0) for p in params], np.int32),
            top_p=np.array([p.top_p for p in params] if top_p is None else top_p, np.float32),
            min_p=np.array([p.min_p for p in params], np.float32),
            uniforms=uniforms,
            masks=masks,
        )

    def __len__(self) -> int:
        return len(self.uniforms)

    def rows(self, wanted: npt.NDArray[np.intp]) -> SamplingBatch:
        """Those of some rows, whose masks are applied."""
        return SamplingBatch(
            self.temperature[wanted],
            self.top_k[wanted],
            self.top_p[wanted],
            self.min_p[wanted],
            self.uniforms[wanted],
        )


def choose(logits: FloatRows, draws: SamplingBatch) -> Int32Array:
    """A token for each row of float32[R, V], int32[R]; INVALID_TOKEN where there is none. Masks change the logits."""
    if draws.masks is not None:
        draws.masks.apply(logits)
    tokens: Int32Array = logits.argmax(axis=1).astype(np.int32)
    # argmax of a row with NaN is the NaN, so such a row is recognised by its token.
    broken = ~(logits[np.arange(len(tokens)), tokens] > -np.inf)
    random = np.flatnonzero((draws.temperature > 0) & ~broken)
    if len(random):
        chosen = draws.rows(random)
        weights = exponentials(logits[random], chosen.temperature)
        kept = filter_weights(weights, chosen.top_k, chosen.top_p, chosen.min_p)
        tokens[random] = draw(kept, chosen.uniforms)
    tokens[broken] = INVALID_TOKEN
    return tokens


def exponentials(logits: FloatRows, temperature: FloatRows) -> FloatRows:
    """Probabilities over that of the most likely token, float32[R, V]."""
    shifted = (logits - logits.max(axis=1, keepdims=True)) * (np.float32(1) / temperature)[:, None]
    weights: FloatRows = np.exp(shifted)
    return weights


def draw(weights: FloatRows, uniforms: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Index drawn from each row of float32[R, V] by the inverse of its distribution function at uniforms[R]."""
    cumulative = weights.astype(np.float64).cumsum(axis=-1)
    targets = uniforms * cumulative[:, -1]
    return np.array(
        [np.searchsorted(row, target, side="right") for row, target in zip(cumulative, targets, strict=True)]
    ).clip(max=weights.shape[-1] - 1)


def filter_weights(weights: FloatRows, top_k: Int32Array, top_p: FloatRows, min_p: FloatRows) -> FloatRows:
    """Zero in each row of float32[R, V] what top-k, then top-p, then min-p drop.

    top_p keeps the smallest set of the most likely tokens whose mass reaches it (nucleus sampling,
    arXiv:1904.09751); min_p drops what is less likely than that share of the most likely token (arXiv:2407.01082).
    Of equally likely tokens the first goes before; the most likely one always stays.
    """
    if not (top_k.any() or (top_p < 1).any() or min_p.any()):
        return weights
    vocab = weights.shape[1]
    order = np.argsort(-weights, axis=1, kind="stable")
    ordered = np.take_along_axis(weights, order, axis=1)
    in_top_k = np.arange(vocab) < np.where(top_k > 0, top_k, vocab)[:, None]
    mass = np.where(in_top_k, ordered, 0).cumsum(axis=1, dtype=np.float64)
    # Mass before a token: below top_p, the token is still needed to reach it. A top_p of 1 keeps all, whatever
    # rounding says of the sum.
    before = mass - ordered
    in_top_p = (before < top_p[:, None].astype(np.float64) * mass[:, -1:]) | (top_p[:, None] >= 1)
    in_min_p = ordered >= min_p[:, None] * ordered[:, :1]
    keep = in_top_k & in_top_p & in_min_p
    keep[:, 0] = True
    kept = np.zeros_like(weights)
    np.put_along_axis(kept, order, np.where(keep, ordered, np.float32(0)), axis=1)
    return kept
