"""Layers of the reference runner, and numpy layers of the host, against torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn import functional

from neso.engine.runners import numpy_layers
from neso.engine.runners.reference import layers
from neso.engine.runners.reference.rotary import cos_sin, rotate
from neso.engine.specs.rotary_spec import RotarySpec


@pytest.mark.parametrize("linear", [layers.linear, numpy_layers.linear], ids=["reference", "numpy"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 32, 33])
@pytest.mark.parametrize("outputs", [5, 1024, 2500])
def test_linear(tokens: int, outputs: int, linear: Callable[..., np.ndarray]) -> None:
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


@pytest.mark.parametrize("module", [layers, numpy_layers], ids=["reference", "numpy"])
def test_activations_far_from_zero(module: ModuleType) -> None:
    x = np.array([-1e4, -200, -89, -20, -1, -0.0, 0, 1e-20, 1, 30, 200, 1e4], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, expected in (
            ("silu", functional.silu(torch.from_numpy(x))),
            ("gelu", functional.gelu(torch.from_numpy(x))),
            ("gelu_tanh", functional.gelu(torch.from_numpy(x), approximate="tanh")),
            ("quick_gelu", torch.from_numpy(x) * torch.sigmoid(1.702 * torch.from_numpy(x))),
        ):
            found = module.ACTIVATIONS[name](x)
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_layer_norm() -> None:
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    weight, bias = np.arange(8, dtype=np.float32), np.ones(8, np.float32)
    tensors = [torch.from_numpy(array) for array in (weight, bias)]
    expected = functional.layer_norm(torch.from_numpy(x), (8,), *tensors, 1e-5)
    for layer_norm in (layers.layer_norm, numpy_layers.layer_norm):
        np.testing.assert_allclose(layer_norm(x, weight, bias, 1e-5), expected, atol=1e-5)


def test_rms_norm() -> None:
    x, weight = (
        np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32),
        np.arange(8, dtype=np.float32),
    )
    expected = functional.rms_norm(torch.from_numpy(x), (8,), torch.from_numpy(weight), 1e-5)
    np.testing.assert_allclose(layers.rms_norm(x, weight, 1e-5), expected, atol=1e-6)


def test_rotation_depends_on_relative_position_and_keeps_other_dimensions() -> None:
    spec = RotarySpec(theta=10_000.0, rotary_dim=8, scaling=None)
    heads = np.random.default_rng(0).standard_normal((1, 2, 12)).astype(np.float32)

    def product(first: int, second: int) -> float:
        """Dot product of the first head at one position and the second head at another."""
        rotated = []
        for position in (first, second):
            turned = heads.copy()
            rotate(turned, *cos_sin(spec, np.array([position], np.int32)))
            np.testing.assert_array_equal(turned[..., 8:], heads[..., 8:])
            rotated.append(turned)
        return float(rotated[0][0, 0] @ rotated[1][0, 1])

    assert product(3, 10) == pytest.approx(product(1203, 1210), abs=1e-3)
    assert product(3, 10) != pytest.approx(product(3, 11), abs=1e-3)
