"""Llama 3's rotary scaling: GGUF holds what it does to each frequency, config.json what it is made from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

# Llama 3.1 first; models with a scaling of this kind differ in the length before it, not in the ramp.
_ORIGINAL_LENGTHS = (8192, *(1 << bits for bits in range(10, 18) if bits != 13))
_LOW, _HIGH = 1.0, 4.0
_TOLERANCE = 1e-4


def llama3_scaling(factors: npt.NDArray[np.float32], theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` whose divisors of the frequencies are `factors`, float32[head_dim / 2].

    None if no parameters in use give these factors.
    """
    largest = float(factors.max())
    if not largest > 1.0:
        return None
    for length in _ORIGINAL_LENGTHS:
        if np.allclose(
            _llama3_factors(len(factors), theta, largest, length), factors, rtol=_TOLERANCE, atol=0
        ):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": length,
            }
    return None


def _llama3_factors(count: int, theta: float, factor: float, length: int) -> npt.NDArray[np.float64]:
    """1 for more than `_HIGH` turns in `length` tokens, `factor` for less than `_LOW`, a ramp between."""
    frequencies = theta ** (-np.arange(count) / count)
    turns = length * frequencies / (2 * math.pi)
    kept = np.clip((turns - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
    factors: npt.NDArray[np.float64] = 1 / ((1 - kept) / factor + kept)
    return factors
