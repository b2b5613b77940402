"""The C++ sampler chooses the same tokens as numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_draws import assert_neighbours, random_draws

from neso.engine.runners.native.runner import NativeRunner
from neso.engine.sampling.logprobs import best_candidates
from neso.engine.sampling.token_sampling import INVALID_TOKEN, choose
from neso.engine.specs.registry import decoder_spec
from neso.engine.weights.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def runner(checkpoint_factory: Callable[..., Path]) -> NativeRunner:
    with Checkpoint(checkpoint_factory("llama")) as source:
        return NativeRunner.load(decoder_spec(source.config), source)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 70), spread=st.sampled_from([0.1, 1.0, 5.0, 40.0]))
def test_tokens_equal_numpy(runner: NativeRunner, seed: int, rows: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, runner.spec.vocab_size)) * spread).astype(np.float32)
    draws = random_draws(rng, rows)
    expected, found = choose(logits, draws), runner.choose(logits, draws)
    assert (found == expected).mean() >= 1 - 2 / rows or rows < 4
    assert_neighbours(found, expected, logits, draws, 1e-2)


@pytest.mark.parametrize("fixed", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {}], ids=str)
def test_equal_logits_are_ordered_by_token_id(runner: NativeRunner, fixed: dict[str, float]) -> None:
    rng = np.random.default_rng(1)
    logits = np.zeros((64, runner.spec.vocab_size), np.float32)
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    draws = random_draws(rng, 64, **{**neutral, **fixed})
    np.testing.assert_array_equal(runner.choose(logits, draws), choose(logits, draws))
    greedy = random_draws(rng, 64, temperature=0.0)
    assert runner.choose(logits, greedy).tolist() == [0] * 64


def test_nan_rows_give_invalid_tokens(runner: NativeRunner) -> None:
    rng = np.random.default_rng(2)
    vocab = runner.spec.vocab_size
    logits = rng.standard_normal((6, vocab)).astype(np.float32)
    logits[0, 0] = logits[1, vocab - 1] = logits[2, 33] = np.nan
    logits[3, 5] = np.inf
    logits[4] = -np.inf
    logits[4, 9] = 1.0
    for temperature in (0.0, 1.0):
        draws = random_draws(rng, 6, temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        assert runner.choose(logits, draws)[:3].tolist() == [INVALID_TOKEN] * 3
        assert runner.choose(logits, draws)[4] == 9


def test_wrong_vocab_size_is_rejected(runner: NativeRunner) -> None:
    draws = random_draws(np.random.default_rng(3), 2)
    with pytest.raises(ValueError, match="vocab_size"):
        runner.choose(np.zeros((2, runner.spec.vocab_size + 1), np.float32), draws)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 3, 64, 65, 1000, 4099]),
    count=st.integers(1, 40),
    levels=st.sampled_from([3, 50, 100_000]),
    banned=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_candidates_are_the_largest_in_order(seed, rows, width, count, levels, banned):
    """Few distinct values cause ties: lower positions come first."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, (rows, width)).astype(np.float32)
    scores[rng.random(scores.shape) < banned] = -np.inf
    parents, tokens = best_candidates(scores, lambda values, rows: values, count)
    order = np.argsort(-scores.reshape(-1), kind="stable")[:count]
    order = order[scores.reshape(-1)[order] > -np.inf]
    assert (parents * width + tokens).tolist() == order.tolist()
