"""Quantized weight matrices: integers with group scales, and float8 with block scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float8Array = npt.NDArray[ml_dtypes.float8_e4m3fn]
Rows = slice | npt.NDArray[np.intp]

# Value of each float8 code; a table lookup is faster than ml_dtypes' cast.
_FLOAT8_VALUES: Float32Array = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatrix:
    """weight[n, k] = scales[n, k // group_size] * codes[n, k] + offsets[n, k // group_size].

    - codes: uint8[N, K] from 0 to 2 ** bits - 1, one per byte
    - scales: float32[N, G] with G = ceil(K / group_size)
    - offsets: float32[N, G]; None for symmetric codes: -scales * 2 ** (bits - 1)
    - bits: 4 or 8; group_size: a multiple of 32
    - input_order: int32[K] for permuted inputs (GPTQ act-order): column k of the codes belongs to input
      input_order[k]; None: not permuted

    Raises `ValueError` for unsupported bits or group sizes, and for scales of another shape.
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

    def explicit_offsets(self) -> Float32Array:
        """Return the offsets, float32[N, G], also for symmetric codes."""
        return self.offsets if self.offsets is not None else -self.scales * np.float32(2 ** (self.bits - 1))

    def dequantize(self) -> Float32Array:
        """Return the weights, float32[N, K], with the inputs in their original order."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Float8Matrix:
    """weight[n, k] = scales[n // block[0], k // block[1]] * codes[n, k].

    - codes: float8_e4m3fn[N, K]
    - scales: float32[ceil(N / block[0]), ceil(K / block[1])]
    - block: outputs and inputs that share a scale; (N, K): one scale per matrix, (1, K): one per output

    Raises `ValueError` for codes of another dtype or scales of another shape.
    """

    codes: Float8Array
    scales: Float32Array
    block: tuple[int, int]

    def __post_init__(self) -> None:
        if self.codes.dtype != ml_dtypes.float8_e4m3fn:
            raise ValueError(f"codes must be float8_e4m3fn, not {self.codes.dtype}")
        if min(self.block) < 1:
            raise ValueError(f"blocks of {self.block} are not supported")
        expected = block_grid(self.shape, self.block)
        if self.scales.shape != expected:
            raise ValueError(f"scales must have the shape {expected}, not {self.scales.shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]"""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def output_scales(self) -> Float32Array | None:
        """Return one scale per output, float32[N]; None if scales differ along the inputs."""
        return self.group_scales()[:, 0] if self.scales.shape[1] == 1 else None

    def group_scales(self) -> Float32Array:
        """Return the scales of each output, float32[N, ceil(K / block[1])]."""
        return np.repeat(self.scales, self.block[0], axis=0)[: self.shape[0]]

    def dequantize(self) -> Float32Array:
        """Return the weights, float32[N, K]."""
        outputs, inputs = self.shape
        height, width = self.block
        weights = _FLOAT8_VALUES[self.codes.view(np.uint8)]
        if self.scales.shape[1] == 1:
            weights *= np.repeat(self.scales, height, axis=0)[:outputs]
            return weights
        for row, scales in enumerate(self.scales):
            weights[row * height : (row + 1) * height] *= np.repeat(scales, width)[:inputs]
        return weights


Matrix = npt.NDArray[Any] | QuantizedMatrix | Float8Matrix
"""Weights [outputs, inputs], dense in a float dtype or quantized."""


def dense(matrix: Matrix) -> npt.NDArray[Any]:
    """Return the weights [outputs, inputs] in a float dtype; quantized weights are dequantized to float32."""
    return matrix.dequantize() if isinstance(matrix, (QuantizedMatrix, Float8Matrix)) else matrix


def take_rows(matrix: Matrix, rows: Rows) -> Matrix:
    """Return some of the outputs; a view if `rows` is a slice."""
    if isinstance(matrix, QuantizedMatrix):
        return replace(
            matrix,
            codes=matrix.codes[rows],
            scales=matrix.scales[rows],
            offsets=None if matrix.offsets is None else matrix.offsets[rows],
        )
    if isinstance(matrix, Float8Matrix):
        return Float8Matrix(matrix.codes[rows], matrix.group_scales()[rows], (1, matrix.block[1]))
    return matrix[rows]


def can_stack(parts: Sequence[Matrix]) -> bool:
    """Whether the matrices are quantized, with codes of one kind, the same groups, and the same order of the inputs."""
    first = parts[0]
    if isinstance(first, Float8Matrix):
        return all(isinstance(part, Float8Matrix) and part.block[1] == first.block[1] for part in parts)
    return isinstance(first, QuantizedMatrix) and all(
        isinstance(part, QuantizedMatrix)
        and part.bits == first.bits
        and part.group_size == first.group_size
        and _same_order(part.input_order, first.input_order)
        for part in parts
    )


def _same_order(one: npt.NDArray[np.int32] | None, other: npt.NDArray[np.int32] | None) -> bool:
    if one is None or other is None:
        return one is other
    return np.array_equal(one, other)


def block_grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks that cover a matrix in each dimension."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
