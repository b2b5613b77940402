"""Layers of the reference runner, and numpy layers of the host, against torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from plan_builder import PlanBuilder, random_tokens
from torch.nn import functional

from neso.engine.runners import numpy_layers
from neso.engine.runners.base import CacheLayout
from neso.engine.runners.reference import layers
from neso.engine.runners.reference.rotary import cos_sin, rotate
from neso.engine.runners.reference.runner import ReferenceRunner
from neso.engine.specs.registry import decoder_spec
from neso.engine.specs.rotary_spec import RotarySpec
from neso.engine.weights.checkpoint import Checkpoint


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


def load(directory: Path) -> ReferenceRunner:
    with Checkpoint(directory) as checkpoint:
        return ReferenceRunner.load(decoder_spec(checkpoint.config), checkpoint)


def test_nan_in_one_sequence_does_not_affect_others(llama_checkpoint: Path) -> None:
    """Padding does not read blocks of other sequences, so NaN in one sequence's cache does not spread."""
    runner = load(llama_checkpoint)
    builder = PlanBuilder()
    runner.allocate_cache(builder.layout)
    spoilt, short, long = (builder.sequence(random_tokens(length, seed=length)) for length in (9, 6, 14))
    for sequence in (spoilt, short, long):
        runner.step(builder.plan([(sequence, len(sequence.tokens) - 1)]))
    assert runner._cache is not None
    runner._cache._layers[1][:, spoilt.blocks[0]] = np.nan
    logits = runner.step(builder.plan([(spoilt, 1), (short, 1), (long, 1)]))
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1:]).all()


def test_cache_size(llama_checkpoint: Path) -> None:
    runner = load(llama_checkpoint)
    # layers x (keys, values) x heads x tokens x width x float32
    assert runner.cache_bytes_per_block(16) == 3 * 2 * 2 * 16 * 12 * 4


def test_blocks_can_be_swapped_in_one_step(llama_checkpoint: Path) -> None:
    """All sources of block copies are read before any target is written."""
    runner = load(llama_checkpoint)
    runner.allocate_cache(CacheLayout(4, 2))
    cache = runner._cache
    assert cache is not None
    cache._layers[0][:] = np.arange(4)[None, :, None, None]
    cache.copy_blocks(np.array([[0, 1], [1, 0], [2, 3]], np.int32))
    assert cache._layers[0][0, :, 0, 0].tolist() == [1, 0, 2, 2]
