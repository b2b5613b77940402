"""Quantiles over a sliding window, compared with exact ones."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.server.metrics.latency import NUM_SLICES, SLICE_NS, LatencySummary

FRACTIONS = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)
START = 1_000 * SLICE_NS


def exact(values: list[int], fraction: float) -> int:
    return sorted(values)[max(1, math.ceil(round(fraction * len(values), 6))) - 1]


def check(summary: LatencySummary, values: list[int], now: int) -> None:
    for fraction, found in zip(FRACTIONS, summary.quantiles(FRACTIONS, now), strict=True):
        assert found == pytest.approx(exact(values, fraction), rel=0.004, abs=0.5), fraction


@given(st.lists(st.integers(0, 10**14), min_size=1, max_size=300))
def test_arbitrary_values(values):
    summary = LatencySummary()
    for value in values:
        summary.add(value, START)
    check(summary, values, START)
    assert (summary.count, summary.ns) == (len(values), sum(values))


@pytest.mark.parametrize("draw", ["lognormvariate", "expovariate", "uniform"])
def test_distributions(draw):
    source = random.Random(draw)
    arguments = {"lognormvariate": (13, 2), "expovariate": (1e-6,), "uniform": (1e5, 9e5)}[draw]
    values = [int(getattr(source, draw)(*arguments)) for _ in range(50_000)]
    summary = LatencySummary()
    for index, value in enumerate(values):
        summary.add(value, START + index * 1_000_000)  # 50 s: across the slices of one window
    check(summary, values, START + len(values) * 1_000_000)


def test_values_older_than_the_window_are_dropped():
    summary = LatencySummary()
    summary.add(1_000_000, START)
    for second in range(0, 48, 6):
        assert summary.quantiles((0.5,), START + second * 10**9)[0] == pytest.approx(1_000_000, rel=0.004)
    summary.add(5_000_000, START + 40 * 10**9)
    assert summary.quantiles((0.0,), START + 61 * 10**9)[0] == pytest.approx(5_000_000, rel=0.004)
    assert math.isnan(summary.quantiles((0.5,), START + 400 * 10**9)[0])
    assert (summary.count, summary.ns) == (2, 6_000_000), "count and sum go on"


def test_memory_is_bounded():
    summary = LatencySummary()
    source = random.Random(0)
    for index in range(100_000):
        summary.add(int(source.lognormvariate(14, 4)), START + index * 10_000_000)
    assert len(summary._old) < NUM_SLICES
    assert sum(len(counts) for counts in (*summary._old, summary._slice)) < 20_000


def test_out_of_order_clock_readings():
    """Durations come from clock readings of several threads: some are negative or late and must be tolerated."""
    summary = LatencySummary()
    summary.add(-5, START)
    summary.add(10, START - 1)
    assert summary.quantiles((0.0, 1.0), START) == [0, 10]
