"""Quantized blocks against the `gguf` package, and the errors of requantizing Q2_K, Q3_K and Q6_K."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import random_blocks

from neso.engine.weights.gguf.blocks import dequantize, quantized_matrix
from neso.engine.weights.gguf.file import OTHER_TYPES, TENSOR_TYPES

EXACT = [
    *(Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1),
    *(Type.Q4_K, Type.Q5_K, Type.IQ4_NL, Type.IQ4_XS),
]
QUANTIZED = [*EXACT, Type.Q2_K, Type.Q3_K, Type.Q6_K]
ROWS, INPUTS = 300, 1024  # more than one conversion batch


def test_types_equal_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        assert Type(number).name == kind.name
        assert gguf.GGML_QUANT_SIZES[Type(number)] == (kind.block_size, kind.block_bytes)
    for number, name in OTHER_TYPES.items():
        assert Type(number).name == name


def dequantized(kind: Type, rows: np.ndarray) -> np.ndarray:
    values = np.full((len(rows), INPUTS), np.nan, np.float32)
    dequantize(TENSOR_TYPES[kind], rows, values)
    return values


@pytest.mark.parametrize("kind", QUANTIZED)
def test_dequantized_exactly(kind: Type) -> None:
    rows = random_blocks(kind, ROWS, INPUTS)
    np.testing.assert_array_equal(dequantized(kind, rows), gguf.quants.dequantize(rows, kind))


def test_dequantize_into_strided_target() -> None:
    rows = random_blocks(Type.Q8_0, 4, 64)
    target = np.zeros((4, 100), np.float32)
    dequantize(TENSOR_TYPES[Type.Q8_0], rows, target[:, :64])
    np.testing.assert_array_equal(target[:, :64], gguf.quants.dequantize(rows, Type.Q8_0))
    assert not target[:, 64:].any()


@pytest.mark.parametrize("kind", EXACT)
def test_codes_give_the_same_values(kind: Type) -> None:
    rows = random_blocks(kind, ROWS, INPUTS)
    matrix = quantized_matrix(TENSOR_TYPES[kind], rows)
    np.testing.assert_array_equal(matrix.dequantize(), gguf.quants.dequantize(rows, kind))


def q6_k_scales(rows: np.ndarray) -> np.ndarray:
    """The scale of each group of 16: float32[groups of 32, 2]."""
    blocks = rows.reshape(-1, 210)
    d = blocks[:, 208:].copy().view(np.float16).astype(np.float32)
    return (d * blocks[:, 192:208].view(np.int8)).reshape(-1, 2)


def test_q6_k_is_requantized_within_an_eighth_of_a_scale() -> None:
    rows = random_blocks(Type.Q6_K, ROWS, INPUTS)
    rows.reshape(-1, 210)[:, 192:208] &= 0x7F  # scales of one sign
    exact, matrix = dequantized(Type.Q6_K, rows), quantized_matrix(TENSOR_TYPES[Type.Q6_K], rows)
    errors = np.abs(matrix.dequantize() - exact).reshape(-1, 2, 16).max(axis=2)
    scales = np.abs(q6_k_scales(rows))
    larger = scales.max(axis=1, keepdims=True)
    assert (errors <= larger * 0.1251).all()
    # The half with the larger scale, and halves with equal scales, are exact except for float32 rounding.
    assert (errors <= larger * 1e-5)[scales == larger].all()
    relative = np.linalg.norm(matrix.dequantize() - exact) / np.linalg.norm(exact)
    assert relative < 0.005


def test_q6_k_with_scales_of_both_signs() -> None:
    rows = random_blocks(Type.Q6_K, ROWS, INPUTS)
    exact, matrix = dequantized(Type.Q6_K, rows), quantized_matrix(TENSOR_TYPES[Type.Q6_K], rows)
    errors = np.abs(matrix.dequantize() - exact).reshape(-1, 32).max(axis=1)
    assert (errors <= np.abs(q6_k_scales(rows)).max(axis=1) * 0.2501).all()


def test_q2_k_error_is_at_most_1_510th_of_the_range_of_a_group() -> None:
    rows = random_blocks(Type.Q2_K, ROWS, INPUTS)
    exact = dequantized(Type.Q2_K, rows).reshape(-1, 32)
    found = quantized_matrix(TENSOR_TYPES[Type.Q2_K], rows).dequantize().reshape(-1, 32)
    ranges = exact.max(axis=1) - exact.min(axis=1)
    assert (np.abs(found - exact).max(axis=1) <= ranges * (1.001 / 510)).all()


def test_q3_k_error_is_at_most_a_32nd_of_a_scale() -> None:
    rows = random_blocks(Type.Q3_K, ROWS, INPUTS)
    exact = dequantized(Type.Q3_K, rows)
    found = quantized_matrix(TENSOR_TYPES[Type.Q3_K], rows).dequantize()
    # The largest code is 4 scales, and it may be the one of the smaller scale.
    scales = np.abs(exact.reshape(-1, 32)).max(axis=1)
    assert (np.abs(found - exact).reshape(-1, 32).max(axis=1) <= scales * (1.001 / 32)).all()
    assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.01


@pytest.mark.parametrize("kind", QUANTIZED)
def test_blocks_of_zeros_are_zeros(kind: Type) -> None:
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    matrix = quantized_matrix(TENSOR_TYPES[kind], np.zeros((3, 2 * block_bytes), np.uint8))
    assert matrix.shape == (3, 2 * size)
    assert not matrix.dequantize().any()
