"""A weight matrix in 8-bit floats with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float8Array = npt.NDArray[ml_dtypes.float8_e4m3fn]

# The value of each code; looking them up is faster than ml_dtypes' own cast.
_VALUES: Float32Array = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Float8Matrix:
    """weight[n, k] = scales[n // block[0], k // block[1]] * codes[n, k].

    - codes: float8_e4m3fn[N, K]; those that are NaN stand for NaN
    - scales: float32[ceil(N / block[0]), ceil(K / block[1])]
    - block: outputs and inputs that share a scale, at least 1 each; (N, K): one scale, (1, K): one for each output

    Raises `ValueError` when the codes have another type or the scales another shape.
    """

    codes: Float8Array
    scales: Float32Array
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if self.codes.dtype != ml_dtypes.float8_e4m3fn:
            raise ValueError(f"codes must be float8_e4m3fn, not {self.codes.dtype}")
        if min(self.block) < 1:
            raise ValueError(f"blocks of {self.block} are not supported")
        expected = grid(self.shape, self.block)
        if self.scales.shape != expected:
            raise ValueError(f"scales must have the shape {expected}, not {self.scales.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]"""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def scale_of_outputs(self) -> Float32Array | None:
        """The scale of each output, float32[N]; None where it differs along the inputs."""
        if self.scales.shape[1] != 1:
            return None
        return np.repeat(self.scales[:, 0], self.block[0])[: self.shape[0]]

    def dequantize(self) -> Float32Array:
        """The weights, float32[N, K]."""
        outputs, inputs = self.shape
        height, width = self.block
        weights = _VALUES[self.codes.view(np.uint8)]
        if self.scales.shape[1] == 1:
            weights *= np.repeat(self.scales, height, axis=0)[:outputs]
            return weights
        for row, scales in enumerate(self.scales):
            weights[row * height : (row + 1) * height] *= np.repeat(scales, width)[:inputs]
        return weights


def grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks cover a matrix; those at its end may stick out."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
