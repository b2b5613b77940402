"""Latency histograms and summaries of a model."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from prometheus_client.samples import Sample

from neso.server.errors import InvalidArgument
from neso.server.metrics.config import MetricsConfig, Quantile
from neso.server.metrics.registry import format_number

logger = logging.getLogger(__name__)

FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)

SLICE_NS = 12_000_000_000
NUM_SLICES = 5
"""Window of summaries: the current slice and the four preceding slices, 48 to 60 s."""
_BITS = 7  # mantissa bits of a bucket after the leading bit


class BucketCounts:
    """Counts of a histogram. `bounds` are the upper bounds of the buckets, increasing, without the infinite one.

    Samples are in Triton's order and format, which prometheus-client's `Histogram` cannot produce.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    @staticmethod
    def check_bounds(name: str, buckets: Sequence[float]) -> tuple[float, ...]:
        """Return the bounds. Raises `InvalidArgument` if they are not increasing."""
        bounds = tuple(float(bound) for bound in buckets if bound != float("inf"))
        if not all(low < high for low, high in pairwise(bounds)) or any(bound != bound for bound in bounds):
            raise InvalidArgument(f"buckets of '{name}' must be monotonically increasing")
        return bounds

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def merged(self, other: BucketCounts) -> BucketCounts:
        """Return the sum of two histograms with the same bounds."""
        result = BucketCounts(self.bounds)
        result.sum = self.sum + other.sum
        result._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        return result

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        """Yield samples of the text format. Bounds are formatted as in Triton: 1, not 1.0."""
        total = 0
        counts = list(self._counts)
        yield Sample(f"{name}_count", labels, sum(counts))
        yield Sample(f"{name}_sum", labels, self.sum)
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            total += count
            yield Sample(f"{name}_bucket", {**labels, "le": format_number(bound)}, total)


class LatencySummary:
    """Durations: count and sum since the start, and quantiles over the window, in bounded memory.

    A bucket spans 1/128 of its value (values below 256 ns are exact), so a quantile is exact in rank and within 0.4 %
    in value. Adding a value takes a few integer operations; a slice has at most a few thousand buckets.
    """

    __slots__ = ("_old", "_slice", "_slice_end", "count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0
        self._slice: dict[int, int] = {}
        self._slice_end = 0
        self._old: deque[dict[int, int]] = deque(maxlen=NUM_SLICES - 1)

    def add(self, ns: int, now: int) -> None:
        """Count a duration (ns; negative durations count as 0). `now`: monotonic clock, ns."""
        if ns < 0:
            ns = 0
        if now >= self._slice_end:
            self._advance(now)
        shift = ns.bit_length() - _BITS - 1
        bucket = ns if shift <= 0 else (shift << (_BITS + 1)) + (ns >> shift)
        counts = self._slice
        counts[bucket] = counts.get(bucket, 0) + 1
        self.count += 1
        self.ns += ns

    def quantiles(self, fractions: tuple[float, ...], now: int) -> list[float]:
        """Return the durations (ns) at these quantiles, each from 0 to 1; NaN if the window is empty."""
        if now >= self._slice_end:
            self._advance(now)
        slices = [counts for counts in (*self._old, self._slice) if counts]
        if not slices:
            return [float("nan")] * len(fractions)
        merged = Counter(slices[0])
        for counts in slices[1:]:
            merged.update(counts)
        total = merged.total()
        ranked = sorted(merged.items())
        return [_value_at(ranked, max(1, _ceil(fraction * total))) for fraction in fractions]

    def merged(self, other: LatencySummary, now: int) -> LatencySummary:
        """Return the summary of the durations of both, which use the same clock."""
        result = LatencySummary()
        result.count, result.ns = self.count + other.count, self.ns + other.ns
        result._slice_end = now - now % SLICE_NS + SLICE_NS
        slices: list[Counter[int]] = [Counter() for _ in range(NUM_SLICES)]
        for summary in (self, other):
            passed = (result._slice_end - summary._slice_end) // SLICE_NS
            for age, counts in enumerate((summary._slice, *reversed(summary._old))):
                if age + passed < NUM_SLICES:
                    slices[age + passed].update(counts)
        result._slice = dict(slices[0])
        result._old.extend(dict(counts) for counts in reversed(slices[1:]))
        return result

    def _advance(self, now: int) -> None:
        """Start the slice that contains `now`."""
        passed = min(NUM_SLICES, (now - self._slice_end) // SLICE_NS + 1)
        for _ in range(passed):
            self._old.append(self._slice)
            self._slice = {}
        self._slice_end = now - now % SLICE_NS + SLICE_NS


def _value_at(ranked: list[tuple[int, int]], rank: int) -> float:
    bucket = 0
    for bucket, count in ranked:  # noqa: B007  used below
        rank -= count
        if rank <= 0:
            break
    shift = bucket >> (_BITS + 1)
    low = (bucket & ((2 << _BITS) - 1)) << shift
    return low + ((1 << shift) - 1) / 2


def _ceil(value: float) -> int:
    """Round up, tolerating the rounding error of the multiplication."""
    nearest = round(value)
    return nearest if abs(value - nearest) < 1e-9 * max(1.0, value) else int(value) + 1


class ModelLatencies:
    """Duration summaries of a model's successful requests by stage. Not thread-safe: used on the core's event loop."""

    def __init__(self, quantiles: tuple[Quantile, ...]) -> None:
        self.quantiles = quantiles
        self.request = LatencySummary()
        self.queue = LatencySummary()
        self.compute_input = LatencySummary()
        self.compute_infer = LatencySummary()
        self.compute_output = LatencySummary()
        self.cache_hit = LatencySummary()
        self.cache_miss = LatencySummary()

    @classmethod
    def from_config(cls, config: MetricsConfig) -> ModelLatencies | None:
        """Create the summaries; None if they are disabled."""
        return cls(config.summary_quantiles) if config.summary_latencies else None

    def merged(self, other: ModelLatencies) -> ModelLatencies:
        """Return the summaries of the requests of two processes."""
        result, now = ModelLatencies(self.quantiles), time.monotonic_ns()
        for name, summary in vars(self).items():
            if isinstance(summary, LatencySummary):
                setattr(result, name, summary.merged(getattr(other, name), now))
        return result

    def add_success(self, now: int, request: int, stages: tuple[int, int, int, int]) -> None:
        """Add a computed request: total ns, and ns of queue, compute input, infer and output."""
        queue, compute_input, compute_infer, compute_output = stages
        self.request.add(request, now)
        self.queue.add(queue, now)
        self.compute_input.add(compute_input, now)
        self.compute_infer.add(compute_infer, now)
        self.compute_output.add(compute_output, now)

    def add_cache_hit(self, now: int, queue: int, cache: int) -> None:
        """Add a request answered by the response cache: ns of queue and cache lookup."""
        self.queue.add(queue, now)
        self.cache_hit.add(cache, now)


def first_response_histogram(config: MetricsConfig, model_config: Any) -> BucketCounts | None:
    """Create the histogram of milliseconds to the first response; None if disabled.

    Raises `InvalidArgument` if the buckets of the `ModelConfig`'s `model_metrics` do not increase.
    """
    buckets: tuple[float, ...] = FIRST_RESPONSE_BUCKETS
    for control in model_config.model_metrics.metric_control:
        family = control.metric_identifier.family
        if family != FIRST_RESPONSE_FAMILY:
            logger.warning("model '%s': metric '%s' cannot be configured", model_config.name, family)
        elif control.histogram_options.buckets:
            buckets = BucketCounts.check_bounds(family, control.histogram_options.buckets)
    return BucketCounts(buckets) if config.histogram_latencies else None
