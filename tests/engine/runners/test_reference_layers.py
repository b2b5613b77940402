"""The parts of the reference runner against torch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from neso.engine.runners.reference.layers import gelu_tanh, linear, rms_norm, silu
from neso.engine.runners.reference.rotary import RotaryTable, rotate
from neso.engine.specs.rotary_spec import RotarySpec


@pytest.mark.parametrize("tokens", [0, 1, 2, 32, 33])
@pytest.mark.parametrize("outputs", [5, 1024, 2500])
def test_linear(tokens: int, outputs: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((tokens, 24), np.float32)
    weight, bias = (
        random.standard_normal((outputs, 24), np.float32),
        random.standard_normal(outputs, np.float32),
    )
    out = linear(x, weight, bias)
    assert out.flags.c_contiguous
    expected = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    np.testing.assert_allclose(out, expected, atol=1e-4)


def test_activations_far_from_zero() -> None:
    x = np.array([-1e4, -200, -89, -20, -1, -0.0, 0, 1e-20, 1, 30, 200, 1e4], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(
            silu(x), torch.nn.functional.silu(torch.from_numpy(x)), rtol=1e-5, atol=1e-7
        )
        expected = torch.nn.functional.gelu(torch.from_numpy(x), approximate="tanh")
        np.testing.assert_allclose(gelu_tanh(x), expected, rtol=1e-5, atol=1e-7)


def test_rms_norm() -> None:
    x, weight = (
        np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32),
        np.arange(8, dtype=np.float32),
    )
    expected = torch.nn.functional.rms_norm(torch.from_numpy(x), (8,), torch.from_numpy(weight), 1e-5)
    np.testing.assert_allclose(rms_norm(x, weight, 1e-5), expected, atol=1e-6)


def test_rotation_keeps_relative_positions_and_the_dimensions_beyond() -> None:
    table = RotaryTable(RotarySpec(theta=10_000.0, rotary_dim=8, scaling=None))
    heads = np.random.default_rng(0).standard_normal((1, 2, 12)).astype(np.float32)

    def product(first: int, second: int) -> float:
        """Of the first head at one position and the second head at another."""
        rotated = []
        for position in (first, second):
            turned = heads.copy()
            rotate(turned, *table.lookup(np.array([position], np.int32)))
            np.testing.assert_array_equal(turned[..., 8:], heads[..., 8:])
            rotated.append(turned)
        return float(rotated[0][0, 0] @ rotated[1][0, 1])

    assert product(3, 10) == pytest.approx(product(1203, 1210), abs=1e-3)
    assert product(3, 10) != pytest.approx(product(3, 11), abs=1e-3)


def test_table_grows() -> None:
    table = RotaryTable(RotarySpec(theta=10_000.0, rotary_dim=4, scaling=None))
    near, _ = table.lookup(np.array([5], np.int32))
    far, _ = table.lookup(np.array([5, 70_000], np.int32))
    np.testing.assert_array_equal(far[0], near[0])
    assert far[1, 0, 0] == pytest.approx(np.cos(np.float32(70_000)), abs=1e-6)
