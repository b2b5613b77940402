"""Quantiles of the last minute, in bounded memory."""

from __future__ import annotations

from collections import Counter, deque

SLICE_NS = 12_000_000_000
NUM_SLICES = 5
"""The window: the slice that is being filled and the four before it, 48 to 60 s."""

_BITS = 7  # of a value that are kept after its leading one


class LatencySummary:
    """Durations: how many and how long in all since the start, and quantiles of the window.

    A value is counted in a bucket of a 128th of its size (values below 256 ns exactly), so that a quantile is that of
    the very rank that was asked for, give or take 0.4 % of its value. Adding is a few operations on integers, whatever
    has come before; a slice holds at most some thousand buckets.
    """

    __slots__ = ("_old", "_slice", "_slice_end", "count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0
        self._slice: dict[int, int] = {}
        self._slice_end = 0
        self._old: deque[dict[int, int]] = deque(maxlen=NUM_SLICES - 1)

    def add(self, ns: int, now: int) -> None:
        """Count a duration (ns; one below 0 counts as 0). `now` is the monotonic clock's, ns."""
        if ns < 0:
            ns = 0
        if now >= self._slice_end:
            self._turn(now)
        shift = ns.bit_length() - _BITS - 1
        bucket = ns if shift <= 0 else (shift << (_BITS + 1)) + (ns >> shift)
        counts = self._slice
        counts[bucket] = counts.get(bucket, 0) + 1
        self.count += 1
        self.ns += ns

    def quantiles(self, fractions: tuple[float, ...], now: int) -> list[float]:
        """Durations (ns) of these quantiles, each from 0 to 1; not a number where the window is empty."""
        if now >= self._slice_end:
            self._turn(now)
        slices = [counts for counts in (*self._old, self._slice) if counts]
        if not slices:
            return [float("nan")] * len(fractions)
        merged = Counter(slices[0])
        for counts in slices[1:]:
            merged.update(counts)
        total = merged.total()
        ranked = sorted(merged.items())
        return [_value_at(ranked, max(1, _ceil(fraction * total))) for fraction in fractions]

    def _turn(self, now: int) -> None:
        """Begin the slice that `now` lies in."""
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
    """Upwards to a whole rank, but for what the multiplication was off."""
    nearest = round(value)
    return nearest if abs(value - nearest) < 1e-9 * max(1.0, value) else int(value) + 1
