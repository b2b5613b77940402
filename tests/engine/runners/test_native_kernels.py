"""Every kernel against numpy, for each instruction set that this CPU has."""

from __future__ import annotations

import math
import platform
import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import neso._native as _native
from neso.engine.runners.native.packing import INT4, INT8, SCHEMES, Kind, PackedMatrix, Packer, quantize
from neso.engine.runners.reference.layers import ACTIVATIONS, layer_norm
from neso.engine.runners.reference.layers import rms_norm as reference_norm
from neso.engine.weights.quantized import QuantizedMatrix

ALL_ISAS = [
    "generic",
    "avx2",
    "avx_vnni",
    "avx512",
    "avx512_vnni",
    "avx512_bf16",
    "amx",
    "neon_dot",
    "neon_bf16",
]
DTYPES: dict[Kind, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
SHAPES = [(48, 48), (37, 80), (400, 96), (130, 1024)]  # outputs, inputs: whole panels and groups, and not
ROWS = [1, 2, 4, 5, 7, 13, 16, 17, 33, 64, 65, 130]  # around every threshold of the kernels

# Relative to the L2 norm of the result. Inputs are rounded to 8 bits of mantissa with bfloat16 weights, to 16 or 8
# bits with quantized weights (with many rows, the weights are rounded to bfloat16 instead).
TOLERANCE = {"f32": 2e-6, "f16": 2e-6, "bf16": 4e-3, "int8": 5e-3, "int4": 5e-3, "dynamic": 1.5e-2}


@pytest.fixture(params=ALL_ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in _native.supported_isas():
        pytest.skip(f"this CPU has no {request.param}")
    return str(request.param)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="reads Linux's list of CPU flags"
)
def test_instruction_sets_are_those_of_the_cpu():
    flags = set(re.search(r"^flags\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())
    needed = {"generic": set(), "avx2": {"avx2", "fma", "f16c"}}
    needed["avx512"] = needed["avx2"] | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
    needed["avx_vnni"] = needed["avx2"] | {"avx_vnni"}
    needed["avx512_vnni"] = needed["avx512"] | {"avx512_vnni"}
    needed["avx512_bf16"] = needed["avx512_vnni"] | {"avx512_bf16"}
    needed["amx"] = needed["avx512_bf16"] | {"amx_tile", "amx_bf16", "amx_int8"}
    assert set(_native.supported_isas()) == {isa for isa, features in needed.items() if features <= flags}


def packer(kind: Kind = "f32", **options: Any) -> Packer:
    return Packer(kind, options.get("scheme"), options.get("dynamic", False), threads=2)


def multiply(matrix: PackedMatrix, x: npt.NDArray[np.float32], isa: str, threads: int = 2) -> Any:
    out = np.full((len(x), matrix.outputs), np.nan, np.float32)
    _native.matmul(matrix.native(), x, out, isa, threads)
    return out


def rows_of(matrix: PackedMatrix, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    """Return the weights of a packed matrix, float32[outputs, inputs]."""
    weights, native = np.empty(shape, np.float32), matrix.native()
    for index, row in enumerate(weights):
        _native.matrix_row(native, index, row, "generic")
    return weights


def relative_error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def normal(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32)


def random_codes(
    rng: np.random.Generator, outputs: int, inputs: int, bits: int, group: int, *, offsets: bool, order: bool
) -> QuantizedMatrix:
    groups = -(-inputs // group)
    scales = rng.uniform(0.5e-3, 2e-3, (outputs, groups)).astype(np.float16).astype(np.float32)
    return QuantizedMatrix(
        codes=rng.integers(0, 2**bits, (outputs, inputs), np.uint8),
        scales=scales,
        offsets=(scales * rng.integers(-9, 0, scales.shape)).astype(np.float32) if offsets else None,
        bits=bits,
        group_size=group,
        input_order=rng.permutation(inputs).astype(np.int32) if order else None,
    )


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense_products(isa: str, kind: Kind, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    weights = normal(rng, *shape).astype(DTYPES[kind])
    bias = normal(rng, shape[0])
    matrix = packer(kind).pack([weights], bias)
    for rows in ROWS:
        x = normal(rng, rows, shape[1])
        expected = x @ weights.astype(np.float32).T + bias
        assert relative_error(multiply(matrix, x, isa), expected) < TOLERANCE[kind], rows


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 128, 256])
@pytest.mark.parametrize("offsets", [False, True], ids=["symmetric", "offsets"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["exact-inputs", "dynamic"])
def test_quantized_products(isa: str, bits: int, group: int, offsets: bool, dynamic: bool) -> None:
    rng = np.random.default_rng(1)
    for outputs, inputs in SHAPES:
        quantized = random_codes(rng, outputs, inputs, bits, group, offsets=offsets, order=group == 64)
        matrix = packer(dynamic=dynamic).pack([quantized])
        for rows in ROWS:
            x = normal(rng, rows, inputs)
            error = relative_error(multiply(matrix, x, isa), x @ quantized.dequantize().T)
            assert error < TOLERANCE["dynamic" if dynamic else f"int{bits}"], (outputs, inputs, rows)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(16, 32), (37, 544), (112, 1056), (130, 192)], ids=str)
@pytest.mark.parametrize("offsets", [False, True], ids=["symmetric", "offsets"])
def test_quantized_products_in_bfloat16_are_those_of_the_unpacked_weights(
    bits: int, shape: tuple[int, int], offsets: bool
) -> None:
    """Unpacking weights ahead of the products changes no bit. Odd and even numbers of panels, one thread and more."""
    thresholds = {"avx512_bf16": 21, "amx": 13}  # fewer rows are multiplied as integers
    levels = [isa for isa in thresholds if isa in _native.supported_isas()]
    if not levels:
        pytest.skip("this CPU has no bfloat16 instructions")
    rng = np.random.default_rng(14)
    quantized = random_codes(rng, *shape, bits, 32, offsets=offsets, order=False)
    bias = normal(rng, shape[0])
    matrix = packer().pack([quantized], bias)
    # The packed weights, rounded as the kernels do: by adding half a unit.
    weights = rows_of(matrix, shape)
    rounded = ((weights.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    dense = packer("bf16").pack([rounded], bias)
    x = normal(rng, 300, shape[1])
    for isa in levels:
        for rows in (13, 16, 17, 64, 100, 300):
            if rows < thresholds[isa]:
                continue
            expected = multiply(dense, x[:rows], isa)
            for threads in (1, 3):
                found = multiply(matrix, x[:rows], isa, threads)
                np.testing.assert_array_equal(found, expected, f"{isa}, {rows} rows, {threads} threads")


@pytest.mark.parametrize("group", [64, 256])
@pytest.mark.parametrize("shape", [(37, 832), (400, 192)], ids=str)
def test_8_bit_products_depend_neither_on_instruction_set_nor_on_batch(
    shape: tuple[int, int], group: int
) -> None:
    """Sums of 8-bit products are exact, and scales are applied in one order: by dot products and by AMX tiles."""
    levels = [
        isa
        for isa in _native.supported_isas()
        if isa in ("avx_vnni", "avx512_vnni", "avx512_bf16", "amx", "neon_dot", "neon_bf16")
    ]
    if not levels:
        pytest.skip("this CPU has no dot products of 8-bit integers")
    rng = np.random.default_rng(13)
    outputs, inputs = shape
    quantized = random_codes(rng, outputs, inputs, 8, group, offsets=False, order=False)
    bias = normal(rng, outputs) if group == 64 else None  # without, whole tiles are stored to the outputs
    matrix = packer(dynamic=True).pack([quantized], bias)
    x = normal(rng, max(ROWS), inputs)
    one_by_one = np.concatenate([multiply(matrix, row[None], levels[-1]) for row in x])
    for isa in levels:
        for rows in ROWS:
            np.testing.assert_array_equal(
                multiply(matrix, x[:rows], isa), one_by_one[:rows], f"{isa}, {rows} rows"
            )


def test_threads_do_not_change_the_result(isa: str) -> None:
    rng = np.random.default_rng(2)
    matrix = packer("bf16").pack([normal(rng, 700, 256)])
    x = normal(rng, 40, 256)
    one = multiply(matrix, x, isa, threads=1)
    for threads in (2, 3, 5):
        np.testing.assert_array_equal(multiply(matrix, x, isa, threads), one)


@pytest.mark.parametrize("kind", ["f32", "bf16", "int8", "int4", "int8_dynamic"])
def test_nan_and_infinity_propagate(isa: str, kind: Any) -> None:
    """NaN and infinity must not be rounded to finite values."""
    rng = np.random.default_rng(3)
    scheme, dynamic = SCHEMES.get(kind), kind == "int8_dynamic"
    matrix = packer("f32" if scheme else kind, scheme=scheme, dynamic=dynamic).pack([normal(rng, 64, 128)])
    for rows in (1, 16, 70):
        x = normal(rng, rows, 128)
        x[rows // 2, 77] = np.nan
        found = multiply(matrix, x, isa)
        assert np.isnan(found[rows // 2]).all()
        assert np.isfinite(np.delete(found, rows // 2, axis=0)).all()


@pytest.mark.parametrize("parts", [(48, 24, 24), (16, 7, 1), (100,)], ids=str)
@pytest.mark.parametrize("kind", DTYPES)
def test_packed_parts_round_trip(isa: str, kind: Kind, parts: tuple[int, ...]) -> None:
    rng = np.random.default_rng(4)
    sources = [normal(rng, rows, 80).astype(DTYPES[kind]) for rows in parts]
    matrix = packer(kind).pack(sources).native()
    out = np.empty(80, np.float32)
    for index, row in enumerate(np.concatenate(sources).astype(np.float32)):
        _native.matrix_row(matrix, index, out, isa)
        np.testing.assert_array_equal(out, row)


@pytest.mark.parametrize("bits", [8, 4])
def test_packed_codes_round_trip(isa: str, bits: int) -> None:
    rng = np.random.default_rng(5)
    quantized = random_codes(rng, 37, 96, bits, 32, offsets=True, order=True)
    matrix = packer().pack([quantized]).native()
    out = np.empty(96, np.float32)
    for index, row in enumerate(quantized.dequantize()):
        _native.matrix_row(matrix, index, out, isa)
        np.testing.assert_allclose(out, row, rtol=2e-3, atol=1e-5)  # scales and offsets have 11 bits


def test_incompatible_quantized_parts_become_dense() -> None:
    rng = np.random.default_rng(6)
    parts = [random_codes(rng, 32, 64, bits, 32, offsets=False, order=False) for bits in (4, 8)]
    matrix = packer("bf16").pack([*parts, normal(rng, 16, 64)])
    assert (matrix.kind, matrix.outputs) == ("bf16", 80)


def test_only_float16_is_stored_as_float16() -> None:
    rng = np.random.default_rng(7)
    weights = normal(rng, 16, 32) * 1e6
    matrix = packer("f16").pack([weights])
    assert matrix.kind == "f32"
    x = normal(rng, 1, 32)
    np.testing.assert_allclose(multiply(matrix, x, "generic"), x @ weights.T, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 12, 64, 1000])
def test_rms_norm(isa: str, count: int) -> None:
    rng = np.random.default_rng(8)
    x, weight, out = normal(rng, count), normal(rng, count), np.empty(count, np.float32)
    _native.rms_norm(x, weight, 1e-5, out, isa)
    np.testing.assert_allclose(out, reference_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 12, 64, 1000])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(isa: str, count: int, biased: bool) -> None:
    rng = np.random.default_rng(11)
    x, weight, out = normal(rng, count) + 3, normal(rng, count), np.empty(count, np.float32)
    bias = normal(rng, count) if biased else None
    _native.layer_norm(x, weight, bias, 1e-5, out, isa)
    np.testing.assert_allclose(out, layer_norm(x, weight, bias, 1e-5), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("count", [1, 12, 64, 1000])
def test_activations(isa: str, activation: Any, count: int) -> None:
    rng = np.random.default_rng(12)
    x, out = normal(rng, count) * 5, np.empty(count, np.float32)
    x[: min(3, count)] = [0.0, -200.0, 200.0][: min(3, count)]
    _native.activate(activation, x, out, isa)
    np.testing.assert_allclose(out, ACTIVATIONS[activation](x), rtol=2e-5, atol=1e-6)


def test_gelu_is_close_to_exact(isa: str) -> None:
    x = np.linspace(-8, 8, 4001, dtype=np.float32)
    exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    out = np.empty_like(x)
    _native.activate("gelu", x, out, isa)
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(ACTIVATIONS["gelu"](x), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cap", [0.5, 50.0])
def test_softcap(isa: str, cap: float) -> None:
    x = np.concatenate([np.linspace(-300, 300, 501), np.geomspace(1e-6, 1, 30), [np.nan]]).astype(np.float32)
    expected = cap * np.tanh(x.astype(np.float64) / cap)
    _native.softcap(x, cap, isa)
    np.testing.assert_allclose(x, expected, rtol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
@pytest.mark.parametrize("count", [1, 12, 64, 1000])
def test_gated(isa: str, activation: Any, count: int) -> None:
    rng = np.random.default_rng(9)
    gate = normal(rng, count) * 20
    gate[: min(4, count)] = [0.0, -200.0, 200.0, -87.5][: min(4, count)]
    up, out = normal(rng, count), np.empty(count, np.float32)
    _native.gated(activation, np.concatenate([gate, up]), out, isa)
    expected = ACTIVATIONS[activation](gate) * up
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("half", [1, 6, 32, 40])
def test_rotate(isa: str, half: int) -> None:
    rng = np.random.default_rng(10)
    head, angles = normal(rng, 2 * half + 3), normal(rng, half)
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = head[:half].copy(), head[half : 2 * half].copy()
    expected = np.concatenate([first * cos - second * sin, second * cos + first * sin, head[2 * half :]])
    _native.rotate(head, cos, sin, isa)
    np.testing.assert_allclose(head, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scheme", [INT8, INT4], ids=["int8", "int4"])
def test_quantization_error_is_below_plain_rounding(dtype: Any, scheme: Any) -> None:
    rng = np.random.default_rng(11)
    weights = normal(rng, 60, 160).astype(dtype)
    weights[7] = 0
    quantized = quantize(weights, scheme, threads=1)
    exact = weights.astype(np.float32)
    found = quantized.dequantize()
    assert not found[7].any()
    grouped = np.zeros((60, -(-160 // scheme.group_size) * scheme.group_size), np.float32)
    grouped[:, :160] = exact
    grouped = grouped.reshape(60, -1, scheme.group_size)
    step = np.abs(grouped).max(axis=2, keepdims=True) / (2 ** (scheme.bits - 1) - 1)
    step[step == 0] = 1
    plain = (np.rint(grouped / step) * step).reshape(60, -1)[:, :160]
    assert np.linalg.norm(found - exact) < np.linalg.norm(plain - exact)
    assert relative_error(found, exact) < {8: 8e-3, 4: 9e-2}[scheme.bits]


def test_invalid_arguments_are_named_in_errors() -> None:
    data = np.zeros(_native.packed_bytes("int8", 16, 64), np.uint8)
    scales = np.zeros(32, np.uint16)
    with pytest.raises(ValueError, match="unknown weight kind 'int2'"):
        _native.packed_bytes("int2", 16, 64)
    with pytest.raises(ValueError, match="packed data must have 1024 bytes, not 1023"):
        _native.Matrix("int8", 16, 64, data[:-1], scales, None, 32)
    with pytest.raises(ValueError, match="scales must have 32 values"):
        _native.Matrix("int8", 16, 64, data, scales[:-1], None, 32)
    with pytest.raises(ValueError, match="multiple of 32"):
        _native.Matrix("int8", 16, 64, data, scales, None, 48)
    with pytest.raises(ValueError, match="unknown instruction set 'sse9', known are amx"):
        matrix = _native.Matrix("int8", 16, 64, data, scales, None, 32)
        _native.matmul(matrix, np.zeros((1, 64), np.float32), np.zeros((1, 16), np.float32), "sse9")


COUNTS = st.lists(st.integers(0, 40), max_size=30)


@given(counts=COUNTS, threads=st.integers(1, 9), calls=st.integers(1, 5))
@settings(deadline=None, max_examples=60)
def test_each_chunk_runs_once_per_call(counts: list[int], threads: int, calls: int) -> None:
    assert _native.count_chunks(counts, threads, calls) == [calls] * sum(counts)


@given(counts=COUNTS, threads=st.integers(2, 5))
@settings(deadline=None, max_examples=20)
def test_late_threads_do_not_delay_others(counts: list[int], threads: int) -> None:
    """The other threads start when the first has finished all loops, and find no work."""
    assert _native.count_chunks(counts, threads, calls=2, alone=True) == [2] * sum(counts)


def test_many_more_threads_than_cores() -> None:
    assert _native.count_chunks([64, 1, 0, 7] * 50, 32, calls=10) == [10] * (72 * 50)


def test_zero_threads_are_rejected() -> None:
    with pytest.raises(ValueError, match="there must be a thread"):
        _native.count_chunks([1], 0)
