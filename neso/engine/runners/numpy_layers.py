"""NumPy layers that run on the host for any runner: embeddings of encoders, image projectors, Medusa heads.

The reference runner has its own, simpler implementations of these functions and must not import this module.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from neso.engine.specs.encoder_spec import EncoderActivation

Float32Array = npt.NDArray[np.float32]

# Up to this many tokens, weights are multiplied in blocks of rows that fit the L2 cache: BLAS repacks the matrix for
# large products, which does not pay off for few tokens. Measured with OpenBLAS, 1 to 128 tokens: up to 2x faster.
_MAX_NARROW_TOKENS = 32
_BLOCK_ROWS = 1024


def linear(x: Float32Array, weight: Float32Array, bias: Float32Array | None = None) -> Float32Array:
    """x @ weight.T + bias for x float32[T, inputs] and weight float32[outputs, inputs]."""
    if 1 < len(x) <= _MAX_NARROW_TOKENS:
        out = np.empty((len(x), len(weight)), np.float32)
        for start in range(0, len(weight), _BLOCK_ROWS):
            block = weight[start : start + _BLOCK_ROWS]
            out[:, start : start + _BLOCK_ROWS] = (block @ x.T).T
    else:
        out = x @ weight.T
    if bias is not None:
        out += bias
    return out


def layer_norm(x: Float32Array, weight: Float32Array, bias: Float32Array | None, eps: float) -> Float32Array:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last axis (arXiv 1607.06450)."""
    centered = x - x.mean(axis=-1, keepdims=True)
    squares = np.einsum("...i,...i->...", centered, centered)[..., None]
    normed: Float32Array = centered / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(eps))
    normed *= weight
    if bias is not None:
        normed += bias
    return normed


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    """x / sqrt(mean(x * x) + eps) * weight over the last axis (arXiv 1910.07467)."""
    squares = np.einsum("...i,...i->...", x, x)[..., None]
    normed: Float32Array = x / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(eps)) * weight
    return normed


def silu(x: Float32Array) -> Float32Array:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp overflows to infinity for large negative x; the quotient is -0
        denominator = np.exp(-x)
        denominator += 1
        return np.divide(x, denominator, out=denominator)


def gelu_tanh(x: Float32Array) -> Float32Array:
    """The tanh approximation of GELU (arXiv 1606.08415)."""
    inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    scaled: Float32Array = np.float32(0.5) * x * (1 + np.tanh(inner))
    return scaled


def gelu(x: Float32Array) -> Float32Array:
    """x times the standard normal distribution function."""
    activated: Float32Array = (x * (0.5 + 0.5 * _erf(x * np.sqrt(0.5)))).astype(np.float32)
    return activated


def quick_gelu(x: Float32Array) -> Float32Array:
    """x * sigmoid(1.702 x), CLIP's activation."""
    return silu(np.float32(1.702) * x) / np.float32(1.702)


def relu(x: Float32Array) -> Float32Array:
    return np.maximum(x, np.float32(0))


def _erf(x: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """The error function, within 1.5e-7 (Abramowitz and Stegun 7.1.26)."""
    wide = np.abs(x, dtype=np.float64)
    t = 1 / (1 + 0.3275911 * wide)
    terms = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
    polynomial = np.zeros_like(t)
    for term in reversed(terms):
        polynomial = (polynomial + term) * t
    result: npt.NDArray[np.float64] = np.copysign(1 - polynomial * np.exp(-wide * wide), x)
    return result


ACTIVATIONS: dict[EncoderActivation, Callable[[Float32Array], Float32Array]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": relu,
}
