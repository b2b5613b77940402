from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.perf.statistics import Summary, bootstrap_ratio, mean, quantile

numbers = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50).map(np.array)


@given(numbers)
def test_summary_is_ordered(values):
    summary = Summary.of(values)
    ordered = [summary.min, *summary.percentiles.values(), summary.max]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(ordered))
    assert summary.min <= summary.avg <= summary.max


def test_summary_of_nothing_is_rejected():
    with pytest.raises(ValueError, match="at least one"):
        Summary.of(np.zeros(0))


def test_bootstrap_interval_covers_the_true_ratio_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(60):
        base, other = rng.normal(10, 2, 80), rng.normal(12, 2, 80)
        interval = bootstrap_ratio(base, other, mean, samples=400, confidence=0.9, seed=seed)
        covered += interval.low <= 1.2 <= interval.high
    assert 47 <= covered <= 60  # 54 expected; a binomial falls below 47 in 0.3 % of cases


def test_bootstrap_of_equal_samples_contains_one_and_of_different_ones_does_not():
    rng = np.random.default_rng(2)
    base = rng.exponential(1, 300)
    assert not bootstrap_ratio(base, base, quantile(0.5)).excludes(1)
    assert bootstrap_ratio(base, base * 1.5 + 1, quantile(0.5)).excludes(1)
