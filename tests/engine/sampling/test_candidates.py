"""Selection of the largest values."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.sampling.logprobs import best_candidates


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
