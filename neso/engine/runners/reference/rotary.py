"""Rotary position embedding of the reference runner, computed for each step without tables."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from neso.engine.specs.rotary_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotarySpec,
    YarnScaling,
)

Float32Array = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


def cos_sin(spec: RotarySpec, positions: Int32Array) -> tuple[Float32Array, Float32Array]:
    """Return cosines and sines for positions int32[T]: each float32[T, 1, rotary_dim / 2].

    Positions on three axes are int32[3, T], see `RotarySpec.sections`.
    """
    by_pair = positions[:, None] if positions.ndim == 1 else positions[spec.axes()].T
    # float32 products, as in transformers: at large positions their rounding is noticeable.
    angles = by_pair.astype(np.float32) * frequencies(spec, positions)
    scaling = spec.scaling
    factor = scaling.attention_factor if isinstance(scaling, (YarnScaling, LongScaling)) else 1.0
    return (np.cos(angles) * np.float32(factor))[:, None], (np.sin(angles) * np.float32(factor))[:, None]


def rotate(heads: Float32Array, cos: Float32Array, sin: Float32Array) -> None:
    """Rotate float32[T, heads, head_dim] in place by cos, sin float32[T, 1, rotary_dim / 2].

    Dimension i is rotated with i + rotary_dim / 2; dimensions from rotary_dim on are unchanged (RoFormer, arXiv
    2104.09864, in the dimension order of Hugging Face checkpoints).
    """
    half = cos.shape[-1]
    first, second = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
    heads[..., :half] = first * cos - second * sin
    heads[..., half : 2 * half] = second * cos + first * sin


def frequencies(spec: RotarySpec, positions: npt.NDArray[np.integer]) -> Float32Array:
    """Return radians per position, float32[1, rotary_dim / 2]; float32[T, rotary_dim / 2] under dynamic scaling."""
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    periods: Float32Array = (np.float32(spec.theta) ** exponents[None]).astype(np.float32)
    unscaled: Float32Array = (np.float32(1) / periods).astype(np.float32)
    scaling = spec.scaling
    if isinstance(scaling, LinearScaling):
        return unscaled / np.float32(scaling.factor)
    if isinstance(scaling, DynamicScaling):
        lengths = np.maximum(positions + 1.0, scaling.original_max_position)
        growth = scaling.factor * lengths / scaling.original_max_position - (scaling.factor - 1)
        bases = (spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2))).astype(np.float32)
        scaled: Float32Array = (1 / bases[:, None] ** exponents).astype(np.float32)
        return scaled
    if isinstance(scaling, Llama3Scaling):
        return _llama3(unscaled, scaling)
    if isinstance(scaling, YarnScaling):
        return _yarn(unscaled, spec, scaling)
    if isinstance(scaling, LongScaling):
        factors: Float32Array = np.array(scaling.factors, np.float32)
        return unscaled / factors
    return unscaled


def _llama3(unscaled: Float32Array, scaling: Llama3Scaling) -> Float32Array:
    """Divide long wavelengths by the factor, keep short ones, and interpolate between them."""
    wavelengths = 2 * math.pi / unscaled
    longest_kept = scaling.original_max_position / scaling.high_freq_factor
    shortest_divided = scaling.original_max_position / scaling.low_freq_factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    divided = unscaled / np.float32(scaling.factor)
    scaled = (1 - smooth) * divided + smooth * unscaled
    scaled = np.where(wavelengths < longest_kept, unscaled, scaled)
    return np.where(wavelengths > shortest_divided, divided, scaled).astype(np.float32)


def _yarn(unscaled: Float32Array, spec: RotarySpec, scaling: YarnScaling) -> Float32Array:
    """Apply equations 17 to 20 of arXiv 2309.00071."""
    ends = [
        spec.rotary_dim
        * math.log(scaling.original_max_position / (2 * math.pi * rotations))
        / (2 * math.log(spec.theta))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    ]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if scaling.truncate else ends
    first, last = max(first, 0), min(last, spec.rotary_dim - 1)
    if first == last:
        last += 0.001
    pairs = np.arange(spec.rotary_dim // 2)
    interpolated = np.clip((pairs - first) / (last - first), 0, 1)
    scaled: Float32Array = unscaled * (1 - interpolated) + unscaled / scaling.factor * interpolated
    return scaled.astype(np.float32)
