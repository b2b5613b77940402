"""Group-quantized weights in the layout of the kernels of `triton_quantized`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neso.engine.weights.quantized import Float8Matrix, Float32Array, Matrix, QuantizedMatrix

CodeFormat = Literal["int4", "int8", "e4m3"]


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeights:
    """weight[n, k] = factor * (scales[k // group_size, n] * codes[n, k] + offsets[k // group_size, n]).

    - codes: uint8[chunks, N, bytes]: the codes of `chunk` inputs of an output are adjacent. int4 and int8 are signed; a
      byte has two codes of 4 bits: input i of the chunk in the low bits, input i + chunk / 2 in the high bits
    - scales, offsets: float16 or float32[groups, N]; without offsets: None
    - chunk: 32, 64 or 128 inputs; divides group_size
    - The outputs of one chunk or group are contiguous; chunks and groups need not be adjacent
    - inputs: K; the codes are padded to whole chunks
    - input_order: int32[K]; column k of the codes belongs to input input_order[k]; None: not permuted
    """

    format: CodeFormat
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    chunk: int
    group_size: int
    inputs: int
    factor: float = 1.0
    input_order: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    def part(self, first: int, end: int) -> GroupedWeights:
        """Return a view of the outputs from `first` up to `end`."""
        offsets = None if self.offsets is None else self.offsets[:, first:end]
        return replace(
            self, codes=self.codes[:, first:end], scales=self.scales[:, first:end], offsets=offsets
        )

    @staticmethod
    def supports(matrix: Matrix) -> bool:
        """Whether the matrix is quantized, with groups that tiles of the kernels can have."""
        return not isinstance(matrix, np.ndarray) and _chunk(matrix) >= 32

    @classmethod
    def load(cls, parts: Sequence[Matrix], dtype: torch.dtype, device: torch.device) -> GroupedWeights:
        """Copy matrices to a device, stacked along the outputs; see `supports` and `can_stack`.

        dtype: of the activations. With 16 bits, scales of integers are rounded to float16, as in the native runner;
        dense weights would be rounded as much or more.
        """
        float8 = [part for part in parts if isinstance(part, Float8Matrix)]
        integers = [part for part in parts if isinstance(part, QuantizedMatrix)]
        return cls._float8(float8, device) if float8 else cls._integers(integers, dtype, device)

    @classmethod
    def _float8(cls, parts: list[Float8Matrix], device: torch.device) -> GroupedWeights:
        chunk, (_, width) = _chunk(parts[0]), parts[0].block
        codes = torch.cat(
            [_in_chunks(torch.tensor(part.codes.view(np.uint8)).to(device), chunk) for part in parts], dim=1
        )
        scales = np.concatenate([part.group_scales() for part in parts]).T
        sent = torch.tensor(np.ascontiguousarray(scales)).to(device)
        return cls("e4m3", codes, sent, None, chunk, width, parts[0].shape[1])

    @classmethod
    def _integers(
        cls, parts: list[QuantizedMatrix], dtype: torch.dtype, device: torch.device
    ) -> GroupedWeights:
        first, order = parts[0], parts[0].input_order
        center = 2 ** (first.bits - 1)
        scales = np.concatenate([part.scales for part in parts]).T
        # Those of signed codes; zero for symmetric codes.
        offsets = np.concatenate([part.explicit_offsets() + part.scales * center for part in parts]).T
        largest = max(float(np.abs(values).max(initial=0)) for values in (scales, offsets))
        # A power of two, so that dividing by it is exact; values near 1 stay far from both ends of float16.
        factor = float(2.0 ** np.ceil(np.log2(largest))) if largest > 0 else 1.0

        def send(values: Float32Array) -> Tensor:
            narrow = np.float32 if dtype == torch.float32 else np.float16
            return torch.tensor((values / np.float32(factor)).astype(narrow, order="C")).to(device)

        chunk = _chunk(first)

        def packed(part: QuantizedMatrix) -> Tensor:
            signed = _in_chunks(torch.tensor(part.codes).to(device), chunk) ^ center
            if first.bits != 4:
                return signed
            low, high = signed.chunk(2, dim=2)
            return low | high << 4

        return cls(
            "int4" if first.bits == 4 else "int8",
            torch.cat([packed(part) for part in parts], dim=1),
            send(scales),
            send(offsets) if offsets.any() else None,
            chunk,
            first.group_size,
            first.shape[1],
            factor,
            None if order is None else torch.tensor(order).to(device),
        )


def _chunk(matrix: QuantizedMatrix | Float8Matrix) -> int:
    """Return the inputs of a chunk: a power of two up to 128 that divides the groups."""
    return gcd(matrix.group_size if isinstance(matrix, QuantizedMatrix) else matrix.block[1], 128)


def _in_chunks(codes: Tensor, chunk: int) -> Tensor:
    """View codes uint8[outputs, inputs] as [chunks, outputs, chunk]."""
    padded = functional.pad(codes, (0, -codes.shape[1] % chunk))
    return padded.unflatten(1, (-1, chunk)).transpose(0, 1)
