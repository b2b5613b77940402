"""A weight matrix in integers with a scale for each group of inputs: what every quantized format is read into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """weight[n, k] = scales[n, k // group_size] * codes[n, k] + offsets[n, k // group_size].

    - codes: uint8[N, K], from 0 to 2 ** bits - 1, not packed
    - scales: float32[N, G] with G = ceil(K / group_size)
    - offsets: float32[N, G], or None for the symmetric form: -scales * 2 ** (bits - 1)
    - bits: 4 or 8; group_size: a multiple of 32
    - input_order: int32[K] where the inputs are permuted (GPTQ's act-order): column k of the codes belongs to
      input input_order[k]; None: they are in order
    """

    codes: npt.NDArray[np.uint8]
    scales: Float32Array
    offsets: Float32Array | None
    bits: int
    group_size: int
    input_order: npt.NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        outputs, inputs = self.codes.shape
        groups = (outputs, -(-inputs // self.group_size))
        if self.bits not in (4, 8) or self.group_size < 1 or self.group_size % 32:
            raise ValueError(f"{self.bits} bits in groups of {self.group_size} are not supported")
        if self.scales.shape != groups or (self.offsets is not None and self.offsets.shape != groups):
            raise ValueError(f"scales and offsets must have the shape {groups}, not {self.scales.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]"""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def dequantize(self) -> Float32Array:
        """The weights, float32[N, K], inputs in their own order."""
        inputs = self.shape[1]
        scales = np.repeat(self.scales, self.group_size, axis=1)[:, :inputs]
        if self.offsets is None:
            weights = scales * (self.codes.astype(np.float32) - np.float32(2 ** (self.bits - 1)))
        else:
            offsets = np.repeat(self.offsets, self.group_size, axis=1)[:, :inputs]
            weights = scales * self.codes.astype(np.float32) + offsets
        if self.input_order is None:
            return weights
        ordered = np.empty_like(weights)
        ordered[:, self.input_order] = weights
        return ordered
