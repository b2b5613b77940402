"""Rotary embeddings: frequencies of every kind of scaling against transformers, the tables, the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neso.engine.runners.reference import rotary as reference
from neso.engine.runners.rotary_tables import RotaryTable, attention_factor, inverse_frequencies
from neso.engine.specs.config_reader import ConfigReader
from neso.engine.specs.rotary_spec import DynamicScaling, RotarySpec, YarnScaling

HEAD_DIM, MAX_POSITION = 32, 256

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    YARN,
    {**YARN, "attention_factor": 1.3},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    {**YARN, "mscale": 1.0},
    {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0},
]


def read(config: dict[str, Any]) -> RotarySpec:
    return RotarySpec.from_config(ConfigReader(config), HEAD_DIM, MAX_POSITION)


def oracle(scaling: dict[str, Any], theta: float, length: int | None = None) -> tuple[np.ndarray, float]:
    config = LlamaConfig(
        hidden_size=HEAD_DIM * 2,
        num_attention_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu", seq_len=length)
    return frequencies.numpy(), factor


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: " ".join(map(str, scaling.values())))
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_frequencies_equal_transformers(scaling: dict[str, Any], theta: float) -> None:
    frequencies, factor = oracle(scaling, theta)
    renamed = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    for config in (
        {"rope_parameters": {**scaling, "rope_theta": theta}},
        {"rope_scaling": scaling, "rope_theta": theta},
        {"rope_scaling": renamed, "rope_theta": theta, "rope_parameters": {"rope_theta": 1.0}},
    ):
        spec = read(config)
        for implementation in (inverse_frequencies, reference.frequencies):
            found = implementation(spec, np.arange(3))
            np.testing.assert_allclose(found, frequencies[None], rtol=1e-6, atol=1e-9)
        assert attention_factor(spec) == pytest.approx(factor)


@pytest.mark.parametrize("scaling", [*SCALINGS, {"rope_type": "dynamic", "factor": 3.0}, None], ids=str)
def test_reference_equals_tables(scaling: dict[str, Any] | None) -> None:
    spec = read({"rope_scaling": scaling})
    positions = np.array([0, 3, MAX_POSITION - 1, 1500], np.int32)
    tables = RotaryTable(spec).lookup(positions)
    for found, expected in zip(reference.cos_sin(spec, positions), tables, strict=True):
        assert found.dtype == expected.dtype == np.float32
        np.testing.assert_allclose(found[:, 0], expected, atol=1e-3)


def test_table_grows() -> None:
    table = RotaryTable(RotarySpec(theta=10_000.0, rotary_dim=4, scaling=None))
    near, _ = table.lookup(np.array([5], np.int32))
    far, _ = table.lookup(np.array([5, 70_000], np.int32))
    np.testing.assert_array_equal(far[0], near[0])
    assert far[1, 0] == pytest.approx(np.cos(np.float32(70_000)), abs=1e-6)


def test_dynamic_frequencies_follow_the_position() -> None:
    scaling = {"rope_type": "dynamic", "factor": 3.0}
    spec = read({"rope_scaling": scaling})
    assert spec.scaling == DynamicScaling(3.0, MAX_POSITION)
    positions = np.array([0, MAX_POSITION - 1, MAX_POSITION, 700])
    for implementation in (inverse_frequencies, reference.frequencies):
        for position, row in zip(positions, implementation(spec, positions), strict=True):
            np.testing.assert_allclose(row, oracle(scaling, 10_000.0, int(position) + 1)[0], rtol=1e-6)


def test_fields_of_yarn() -> None:
    spec = read({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 20}})
    assert spec.scaling == YarnScaling(2.0, MAX_POSITION, pytest.approx(1 + 0.1 * np.log(2)), 20.0, 1.0, True)
    implied = read({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}})
    assert isinstance(implied.scaling, YarnScaling)
    assert implied.scaling.factor == 4.0


def test_partial_rotation() -> None:
    spec = read({"partial_rotary_factor": 0.25})
    assert spec.rotary_dim == 8
    assert inverse_frequencies(spec, np.arange(1)).shape == (1, 4)
