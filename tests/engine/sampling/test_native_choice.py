"""The C++ sampler draws the tokens that numpy draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neso.engine.runners.native.runner import NativeRunner
from neso.engine.sampling.random_choice import BROKEN, Draws, choose, exponentials, filter_weights
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def runner(checkpoint_factory: Callable[..., Path]) -> NativeRunner:
    with Checkpoint(checkpoint_factory("llama")) as source:
        return NativeRunner.load(decoder_spec(source.config), source)


def make_draws(rng: np.random.Generator, rows: int, **fixed: float) -> Draws:
    def values(name: str, options: list[float], dtype: type) -> np.ndarray:
        return rng.choice([fixed[name]] if name in fixed else options, rows).astype(dtype)

    return Draws(
        temperature=values("temperature", [0.0, 0.3, 1.0, 2.0], np.float32),
        top_k=values("top_k", [0, 1, 2, 7, 50, 10_000], np.int32),
        top_p=values("top_p", [0.05, 0.5, 0.9, 0.999, 1.0], np.float32),
        min_p=values("min_p", [0.0, 0.01, 0.5], np.float32),
        uniforms=rng.random(rows),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 70), spread=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
def test_the_tokens_are_those_of_numpy(runner: NativeRunner, seed: int, rows: int, spread: float) -> None:
    """Rounding may move the edge of a draw: then the token must be a neighbour in what was left."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, runner.spec.vocab_size)) * spread).astype(np.float32)
    draws = make_draws(rng, rows)
    expected, found = choose(logits, draws), runner.choose(logits, draws)
    assert (found == expected).mean() >= 1 - 2 / rows or rows < 4
    for row in np.flatnonzero(found != expected):
        one = draws.rows(np.array([row]))
        weights = exponentials(logits[[row]], one.temperature)
        # A hair's breadth around the uniform and the filters holds both.
        kept = filter_weights(
            weights, one.top_k, np.minimum(one.top_p + 1e-4, 1), one.min_p * np.float32(0.999)
        )[0]
        cumulative = kept.astype(np.float64).cumsum() / kept.sum(dtype=np.float64)
        low, high = np.searchsorted(cumulative, [one.uniforms[0] - 1e-2, one.uniforms[0] + 1e-2])
        assert low <= found[row] <= high


@pytest.mark.parametrize("fixed", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {}], ids=str)
def test_equal_logits_are_taken_in_order(runner: NativeRunner, fixed: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    logits = np.zeros((64, runner.spec.vocab_size), np.float32)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    draws = make_draws(rng, 64, **{**neutral, **fixed})
    np.testing.assert_array_equal(runner.choose(logits, draws), choose(logits, draws))
    greedy = make_draws(rng, 64, temperature=0.0)
    assert runner.choose(logits, greedy).tolist() == [0] * 64


def test_rows_that_are_no_numbers(runner: NativeRunner) -> None:
    rng = np.random.default_rng(2)
    vocab = runner.spec.vocab_size
    logits = rng.standard_normal((6, vocab)).astype(np.float32)
    logits[0, 0] = logits[1, vocab - 1] = logits[2, 33] = np.nan
    logits[3, 5] = np.inf
    logits[4] = -np.inf
    logits[4, 9] = 1.0
    for temperature in (0.0, 1.0):
        draws = make_draws(rng, 6, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        assert runner.choose(logits, draws)[:3].tolist() == [BROKEN] * 3
        assert runner.choose(logits, draws)[4] == 9


def test_what_does_not_fit_is_refused(runner: NativeRunner) -> None:
    draws = make_draws(np.random.default_rng(3), 2)
    with pytest.raises(ValueError, match="vocab_size"):
        runner.choose(np.zeros((2, runner.spec.vocab_size + 1), np.float32), draws)
