"""Test cases of products with quantized weights: CPU tests interpret the kernels, GPU tests compile them.

A subclass defines the fixtures `device` and `multiplied_dtype`. Expected values are computed on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor
from torch_cases import normal

from neso.engine.runners.torch import triton_quantized as kernels
from neso.engine.runners.torch.grouped_weights import GroupedWeights
from neso.engine.runners.torch.linears import QuantizedExperts, QuantizedLinear
from neso.engine.runners.torch.triton_experts import assign_tiles
from neso.engine.weights.quantized import Float8Matrix, QuantizedMatrix, can_stack

ROWS = (1, 20, kernels.MAX_PRODUCT_ROWS + 1)
"""A tile of few rows, a tile of more, and a dense product."""

# Relative to the norm of a row. With 16 bits, scales are rounded to 2^-12 of themselves and the result by its dtype;
# with many rows the weights as well.
CLOSE = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass(frozen=True)
class Integers:
    """A matrix of integer codes; `outputs` are those of its parts."""

    bits: int
    outputs: tuple[int, ...]
    inputs: int
    group_size: int
    symmetric: bool = False
    permuted: bool = False

    def make(self, seed: int = 0) -> list[QuantizedMatrix]:
        rng = np.random.default_rng(seed)
        # The same with any seed.
        order = np.random.default_rng(0).permutation(self.inputs).astype(np.int32) if self.permuted else None
        groups = -(-self.inputs // self.group_size)
        parts = []
        for outputs in self.outputs:
            scales = rng.uniform(0.5, 1.5, (outputs, groups)).astype(np.float32) * np.float32(1e-3)
            zeros = rng.integers(0, 2**self.bits, scales.shape).astype(np.float32)
            codes = rng.integers(0, 2**self.bits, (outputs, self.inputs)).astype(np.uint8)
            offsets = None if self.symmetric else -scales * zeros
            parts.append(QuantizedMatrix(codes, scales, offsets, self.bits, self.group_size, order))
        return parts


INTEGERS = {
    "4 bits, groups of 128": Integers(4, (96,), 512, 128),
    "4 bits, groups of 32, uneven sizes": Integers(4, (37,), 104, 32),
    "4 bits, groups of 64, stacked": Integers(4, (40, 8, 9), 192, 64),
    "4 bits, groups of 96": Integers(4, (33,), 200, 96),
    "4 bits, one group": Integers(4, (70,), 136, 160),
    "4 bits, symmetric": Integers(4, (70,), 256, 128, symmetric=True),
    "4 bits, act-order": Integers(4, (50, 20), 256, 128, permuted=True),
    "8 bits, groups of 128": Integers(8, (70,), 256, 128),
    "8 bits, groups of 32, symmetric": Integers(8, (37, 5), 104, 32, symmetric=True),
    "8 bits, act-order": Integers(8, (70,), 136, 64, permuted=True),
}
FLOAT8 = {
    "blocks of 128": ((200, 300), (128, 128)),
    "blocks of 32 outputs and 64 inputs": ((40, 100), (32, 64)),
    "blocks of 256 inputs": ((40, 300), (8, 256)),
}

EXPERTS = (
    "4 bits, groups of 64, stacked",
    "4 bits, act-order",
    "8 bits, groups of 32, symmetric",
    "blocks of 32 outputs and 64 inputs",
)
CHOSEN = torch.tensor([[2, 0], [0, 2], [2, 1], [2, 0]])


def float8_matrix(name: str, outputs: int | None = None, seed: int = 1) -> Float8Matrix:
    (height, inputs), block = FLOAT8[name]
    outputs = outputs or height
    rng = np.random.default_rng(seed)
    codes = (rng.standard_normal((outputs, inputs)) * 60).astype(ml_dtypes.float8_e4m3fn)
    grid = -(-outputs // block[0]), -(-inputs // block[1])
    return Float8Matrix(codes, rng.uniform(1e-4, 1e-3, grid).astype(np.float32), block)


def assert_close(found: Tensor, x: Tensor, weight: np.ndarray, bias: Tensor | None) -> None:
    """Compare with the product of float32 weights."""
    expected = torch.nn.functional.linear(
        x.float(), torch.from_numpy(weight), None if bias is None else bias.float()
    )
    assert found.dtype == x.dtype and found.shape == expected.shape
    errors = (found.cpu().float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.max() < CLOSE[x.dtype], errors.max()


class QuantizedProductCases:
    """Products with codes equal those with dequantized weights."""

    @pytest.mark.parametrize("name", INTEGERS)
    def test_integer_product_equals_dequantized(
        self, device: torch.device, multiplied_dtype: torch.dtype, name: str
    ) -> None:
        parts = INTEGERS[name].make()
        assert can_stack(parts) and all(map(GroupedWeights.supports, parts))
        weights = GroupedWeights.load(parts, multiplied_dtype, device)
        assert (weights.offsets is None) == INTEGERS[name].symmetric
        dense = np.concatenate([part.dequantize() for part in parts])
        bias = normal(len(dense), dtype=multiplied_dtype, seed=2)
        linear = QuantizedLinear(weights, bias.to(device))
        for rows in ROWS:
            x = normal(rows, dense.shape[1], dtype=multiplied_dtype)
            assert_close(linear(x.to(device)), x, dense, bias)

    @pytest.mark.parametrize("name", FLOAT8)
    def test_float8_product_equals_dequantized(
        self, device: torch.device, multiplied_dtype: torch.dtype, name: str
    ) -> None:
        parts = [float8_matrix(name), float8_matrix(name, outputs=20)]
        assert can_stack(parts) and all(map(GroupedWeights.supports, parts))
        weights = GroupedWeights.load(parts, multiplied_dtype, device)
        dense = np.concatenate([part.dequantize() for part in parts])
        for rows in (1, 20):
            x = normal(rows, dense.shape[1], dtype=multiplied_dtype)
            assert_close(kernels.multiply(x.to(device), weights, None), x, dense, None)
        restored = kernels.dequantize(weights, torch.float32)
        np.testing.assert_allclose(restored.cpu().numpy(), dense, rtol=1e-6)

    @pytest.mark.parametrize("name", EXPERTS)
    def test_products_of_experts_equal_those_of_each(
        self, device: torch.device, multiplied_dtype: torch.dtype, name: str
    ) -> None:
        """First x has a row for each token, then a row for each slot."""
        experts: list[Sequence[QuantizedMatrix | Float8Matrix]] = [
            [float8_matrix(name, seed=seed)] if name in FLOAT8 else INTEGERS[name].make(seed)
            for seed in range(3)
        ]
        weights = GroupedWeights.load([part for parts in experts for part in parts], multiplied_dtype, device)
        stacked = QuantizedExperts(weights, len(experts))
        tiles = assign_tiles(CHOSEN.to(device), len(experts))
        slots, inputs = CHOSEN.numel(), weights.inputs
        for count in (len(CHOSEN), slots):
            x = normal(count, inputs, dtype=multiplied_dtype)
            found = x.new_empty(slots, stacked.outputs, device=device)
            kernels.multiply_experts(x.to(device), weights, tiles, found)
            for slot, expert in enumerate(CHOSEN.flatten().tolist()):
                row = x[slot * count // slots][None]
                dense = np.concatenate([part.dequantize() for part in experts[expert]])
                assert_close(found[slot][None], row, dense, None)
        assert_close(stacked[expert](row.to(device)), row, dense, None)

    def test_product_of_rounded_activations(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            pytest.skip("this GPU does not multiply e4m3")
        matrix = float8_matrix("blocks of 128")
        weights = GroupedWeights.load([matrix], torch.float32, device)
        chunk, inputs = weights.chunk, matrix.shape[1]
        x = normal(20, inputs) * torch.logspace(-2, 2, inputs)
        codes, scales = (part.cpu() for part in kernels.round_chunks(x.to(device), chunk))
        largest = torch.nn.functional.pad(x.abs(), (0, -inputs % chunk)).unflatten(1, (-1, chunk)).amax(dim=2)
        torch.testing.assert_close(scales.T * 448, largest)
        by_input = scales.T.repeat_interleave(chunk, dim=1)[:, :inputs]
        found_codes, scaled = codes.float(), x / by_input
        requested = scaled.to(torch.float8_e4m3fn).float()
        # Interpreted, numbers that are rounded up to a power of two lose a factor of two; see `KernelCases`.
        up_to_power = (torch.frexp(requested.abs())[0] == 0.5) & (requested.abs() > scaled.abs())
        lost = (up_to_power | (scaled.abs() < 2**-6)) & (device.type == "cpu")
        assert lost.float().mean() < 0.25
        assert ((found_codes != requested) & ~lost).float().mean() < 1e-2
        bias = normal(len(matrix.codes), seed=2)
        found = kernels.multiply(x.to(device), weights, bias.to(device), rounded=True)
        assert_close(found, found_codes * by_input, matrix.dequantize(), bias)
        # Two experts with half of the outputs each; the rows of the second follow those of the first.
        chosen = (torch.arange(20) >= 10).long()[:, None]
        out = x.new_empty(20, 100, device=device)
        kernels.multiply_experts(x.to(device), weights, assign_tiles(chosen.to(device), 2), out, rounded=True)
        whole = kernels.multiply(x.to(device), weights, None, rounded=True)
        expected = torch.cat([whole[:10, :100], whole[10:, 100:]])
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("splits", [1, 3])
    def test_sums_of_splits(self, device: torch.device, monkeypatch: pytest.MonkeyPatch, splits: int) -> None:
        """The last split has fewer chunks."""
        monkeypatch.setattr(kernels, "_splits", lambda programs, chunks, device: splits)
        (matrix,) = INTEGERS["4 bits, groups of 128"].make()
        x, bias = normal(3, matrix.shape[1]), normal(matrix.shape[0], seed=2)
        weights = GroupedWeights.load([matrix], torch.float32, device)
        assert_close(kernels.multiply(x.to(device), weights, bias.to(device)), x, matrix.dequantize(), bias)

    def test_small_scales_keep_their_precision_in_16_bits(self, device: torch.device) -> None:
        """Scales below the range of float16 share a factor."""
        (matrix,) = Integers(4, (32,), 128, 64).make()
        small = QuantizedMatrix(
            matrix.codes, matrix.scales * np.float32(1e-6), matrix.offsets * np.float32(1e-6), 4, 64
        )
        weights = GroupedWeights.load([small], torch.float16, device)
        assert weights.scales.dtype == torch.float16
        restored = kernels.dequantize(weights, torch.float32).cpu().numpy()
        assert np.abs(restored - small.dequantize()).max() < 2**-10 * np.abs(restored).max()

    def test_no_rows(self, device: torch.device) -> None:
        weights = GroupedWeights.load([float8_matrix("blocks of 128")], torch.float32, device)
        assert QuantizedLinear(weights)(normal(0, 300).to(device)).shape == (0, 200)
