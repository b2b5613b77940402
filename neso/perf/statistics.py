"""Summaries of samples, and bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of a sample. Percentiles are interpolated linearly; `std` is that of the population."""

    count: int
    avg: float
    min: float
    max: float
    std: float
    percentiles: dict[int, float]

    @classmethod
    def of(cls, values: Array) -> Summary:
        """Summarize at least one value. Raises `ValueError` for none."""
        if not len(values):
            raise ValueError("a summary needs at least one value")
        found = np.percentile(values, PERCENTILES)
        low, high = float(values.min()), float(values.max())
        # The sum of equal values may round to a mean outside of them.
        mean = min(max(float(values.mean()), low), high)
        quantiles = dict(zip(PERCENTILES, map(float, found), strict=True))
        return cls(len(values), mean, low, high, float(values.std()), quantiles)

    def get(self, statistic: str) -> float:
        """Return a statistic by name: avg, min, max, std, count, or p50, p99, …"""
        if statistic.startswith("p"):
            return self.percentiles[int(statistic[1:])]
        return float(getattr(self, statistic))


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio or difference with the bounds of its confidence interval."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """True if the interval does not contain `value`."""
        return not self.low <= value <= self.high


def bootstrap_ratio(
    base: Array,
    other: Array,
    statistic: Callable[[Array], Array],
    *,
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return statistic(other) / statistic(base) with its bootstrap confidence interval.

    `statistic` reduces the last axis of an array. Both samples are drawn again with replacement, independently.
    """
    rng = np.random.default_rng(seed)
    value = _ratio(statistic(other[None]), statistic(base[None]))[0]
    ratios = _ratio(
        _resampled(other, statistic, samples, rng),
        _resampled(base, statistic, samples, rng),
    )
    tail = 50 * (1 - confidence)
    low, high = np.nanpercentile(ratios, [tail, 100 - tail])
    return Interval(float(value), float(low), float(high))


def _ratio(over: Array, under: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return over / under


def _resampled(
    values: Array, statistic: Callable[[Array], Array], samples: int, rng: np.random.Generator
) -> Array:
    """Return the statistic of each of `samples` resamples, in batches of bounded memory."""
    batch = max(1, 2_000_000 // max(1, len(values)))
    found = []
    for start in range(0, samples, batch):
        size = (min(batch, samples - start), len(values))
        found.append(statistic(values[rng.integers(len(values), size=size)]))
    return np.concatenate(found)


def quantile(share: float) -> Callable[[Array], Array]:
    """Return the statistic that is the quantile `share` (0 … 1)."""
    return lambda values: np.quantile(values, share, axis=-1)


def mean(values: Array) -> Array:
    """Return the mean of the last axis."""
    return np.asarray(values.mean(axis=-1), dtype=np.float64)
