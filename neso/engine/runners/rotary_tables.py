"""Tables of cosines and sines for the native and torch runners.

The reference runner has its own implementation (reference/rotary.py) and must not import this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

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

_INITIAL_LENGTH = 1024


class RotaryTable:
    """Cosines and sines by position. Grows by doubling, because few sequences come near the maximum length."""

    def __init__(self, spec: RotarySpec) -> None:
        self._spec = spec
        self._cos, self._sin = self._compute(_INITIAL_LENGTH)

    def lookup(self, positions: Int32Array) -> tuple[Float32Array, Float32Array]:
        """Return cosines and sines for positions int32[T]: each float32[T, rotary_dim / 2].

        Positions on three axes are int32[3, T], see `RotarySpec.sections`.
        """
        length = int(positions.max()) + 1
        if length > len(self._cos):
            self._cos, self._sin = self._compute(1 << (length - 1).bit_length())
        if positions.ndim == 1:
            return self._cos[positions], self._sin[positions]
        rows, pairs = np.ascontiguousarray(positions[self._spec.axes()].T), np.arange(self._cos.shape[1])
        return self._cos[rows, pairs], self._sin[rows, pairs]

    def _compute(self, length: int) -> tuple[Float32Array, Float32Array]:
        positions = np.arange(length)
        # The product is float32, as in transformers: at large positions its rounding is noticeable.
        angles = positions.astype(np.float32)[:, None] * inverse_frequencies(self._spec, positions)
        factor = np.float32(attention_factor(self._spec))
        return np.cos(angles) * factor, np.sin(angles) * factor


class RotaryTables:
    """One table per distinct rotation of a model."""

    def __init__(self, rotaries: Iterable[RotarySpec | None]) -> None:
        self._tables = {spec: RotaryTable(spec) for spec in dict.fromkeys(rotaries) if spec is not None}

    def index(self, spec: RotarySpec) -> int:
        """Return the index of a rotation in the order of `lookup`."""
        return list(self._tables).index(spec)

    def lookup(self, positions: Int32Array) -> dict[RotarySpec, tuple[Float32Array, Float32Array]]:
        """Return cosines and sines of each rotation, see `RotaryTable.lookup`."""
        return {spec: table.lookup(positions) for spec, table in self._tables.items()}


def inverse_frequencies(spec: RotarySpec, positions: npt.NDArray[np.integer]) -> Float32Array:
    """Return radians per position for each pair of dimensions, float32[1 or T, rotary_dim / 2].

    One row is valid for all positions, except under dynamic scaling, where each position has its own row; see
    `_dynamic`.
    """
    scaling = spec.scaling
    if isinstance(scaling, DynamicScaling):
        return _dynamic(spec, scaling, positions)
    base = _unscaled(spec)
    if isinstance(scaling, LinearScaling):
        base = base / np.float32(scaling.factor)
    elif isinstance(scaling, Llama3Scaling):
        base = _llama3(base, scaling)
    elif isinstance(scaling, YarnScaling):
        base = _yarn(base, spec, scaling)
    elif isinstance(scaling, LongScaling):
        base = np.float32(1) / (np.array(scaling.factors, np.float32) * _wavelengths(spec))
    return base[None, :].astype(np.float32)


def attention_factor(spec: RotarySpec) -> float:
    """Return the multiplier of cosines and sines; 1 except for YaRN and LongRoPE."""
    scaling = spec.scaling
    return scaling.attention_factor if isinstance(scaling, (YarnScaling, LongScaling)) else 1.0


def _unscaled(spec: RotarySpec) -> Float32Array:
    """Return theta ** (-2i / d), float32[d / 2] (RoFormer, arXiv 2104.09864)."""
    return (1.0 / _wavelengths(spec)).astype(np.float32)


def _wavelengths(spec: RotarySpec) -> Float32Array:
    """Return theta ** (2i / d), float32[d / 2]: positions per radian."""
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    wavelengths: Float32Array = (np.float32(spec.theta) ** exponents).astype(np.float32)
    return wavelengths


def _dynamic(spec: RotarySpec, scaling: DynamicScaling, positions: npt.NDArray[np.integer]) -> Float32Array:
    """Return the frequencies of each token for the base of a sequence that ends with it.

    transformers derives the base from the length of the whole batch at the time of the call, so the keys of a prompt
    depend on how it is chunked. Prefix caching, chunked prefill and recomputation after preemption require keys that
    depend only on token and position. The result equals transformers for generated tokens and for prompts of at most
    `original_max_position` tokens, and differs for longer prompts.
    """
    lengths = np.maximum(positions.astype(np.float64) + 1, scaling.original_max_position)
    growth = scaling.factor * lengths / scaling.original_max_position - (scaling.factor - 1)
    base = (spec.theta * growth ** (spec.rotary_dim / (spec.rotary_dim - 2))).astype(np.float32)
    exponents = np.arange(0, spec.rotary_dim, 2, dtype=np.float32) / np.float32(spec.rotary_dim)
    return (1.0 / base[:, None] ** exponents).astype(np.float32)


def _llama3(frequencies: Float32Array, scaling: Llama3Scaling) -> Float32Array:
    """Scale by rotations per original context.

    Frequencies above high_freq_factor are kept, those below low_freq_factor are divided by the factor.
    """
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    ramp = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept: Float32Array = np.clip(ramp, 0.0, 1.0).astype(np.float32)
    scaled: Float32Array = (1 - kept) * (frequencies / np.float32(scaling.factor)) + kept * frequencies
    return scaled


def _yarn(frequencies: Float32Array, spec: RotarySpec, scaling: YarnScaling) -> Float32Array:
    """Apply equations 17-20 of the paper: extrapolate fast dimensions, interpolate slow ones, ramp between."""

    def dimension(rotations: float) -> float:
        """Return the (fractional) pair of dimensions that rotates `rotations` times over the original context."""
        wavelength = scaling.original_max_position / (rotations * 2 * math.pi)
        return spec.rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    high = high + 0.001 if low == high else high
    pairs = np.arange(spec.rotary_dim // 2, dtype=np.float32)
    slow: Float32Array = np.clip((pairs - low) / (high - low), 0.0, 1.0).astype(np.float32)
    return frequencies / np.float32(scaling.factor) * slow + frequencies * (1 - slow)
