"""A histogram's counts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from prometheus_client.samples import Sample

from neso.server.errors import InvalidArgument
from neso.server.metrics.text import number


class Histogram:
    """Counts values by buckets. `bounds` are their upper ends, increasing, without the infinite one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    @staticmethod
    def check_bounds(name: str, buckets: Sequence[float]) -> tuple[float, ...]:
        """Bounds as `__init__` takes them. Raises `InvalidArgument` for those that do not increase."""
        bounds = tuple(float(bound) for bound in buckets if bound != float("inf"))
        if not all(low < high for low, high in pairwise(bounds)) or any(bound != bound for bound in bounds):
            raise InvalidArgument(f"buckets of '{name}' must be monotonically increasing")
        return bounds

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        """The lines of the text format. Bounds look as in Triton: 1, not 1.0."""
        total = 0
        counts = list(self._counts)
        yield Sample(f"{name}_count", labels, sum(counts))
        yield Sample(f"{name}_sum", labels, self.sum)
        for bound, count in zip((*self.bounds, float("inf")), counts, strict=True):
            total += count
            yield Sample(f"{name}_bucket", {**labels, "le": number(bound)}, total)
