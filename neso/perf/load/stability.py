"""Stability criterion of perf_analyzer, which ends a run without a request count or duration."""

from __future__ import annotations

import numpy as np

from neso.perf.load.plan import LoadPlan
from neso.perf.records import Records

NUM_WINDOWS = 3


class StabilityCheck:
    """Divides a load into windows and compares the last three.

    A window lasts `plan.window_seconds`, or until `plan.window_requests` responses are complete. The load is stable if
    in three consecutive windows the throughput and the mean latency each differ by at most `plan.stable_percent`
    from their mean over the three.
    """

    def __init__(self, plan: LoadPlan, start_ns: int) -> None:
        self._plan = plan
        self._start_ns = start_ns
        self._ends = np.empty(0, np.int64)
        self._latencies = np.empty(0, np.int64)
        self.windows: list[tuple[int, int, float, float]] = []
        """Start, end, requests per second, mean latency in ns."""

    def add(self, records: Records) -> None:
        """Add complete requests."""
        ok = records.ok
        ends = records.columns["end_ns"][ok]
        self._ends = np.concatenate([self._ends, ends])
        self._latencies = np.concatenate([self._latencies, ends - records.columns["intended_ns"][ok]])

    def advance(self, now_ns: int) -> bool:
        """Close the windows that have ended. Returns whether the load is stable or has `plan.max_windows` windows."""
        while self._close_window(now_ns):
            if self.is_stable or len(self.windows) >= self._plan.max_windows:
                return True
        return False

    @property
    def is_stable(self) -> bool:
        """Whether the last three windows agree."""
        if len(self.windows) < NUM_WINDOWS:
            return False
        last = np.array(self.windows[-NUM_WINDOWS:])[:, 2:]
        means = last.mean(axis=0)
        return bool(np.all(np.abs(last - means) <= means * self._plan.stable_percent / 100)) and means[0] > 0

    @property
    def measured_from_ns(self) -> int:
        """Start of the last three windows."""
        return self.windows[-NUM_WINDOWS:][0][0] if self.windows else self._start_ns

    def _close_window(self, now_ns: int) -> bool:
        start = self._start_ns
        if self._plan.window_requests:
            if len(self._ends) < self._plan.window_requests:
                return False
            end = int(
                np.partition(self._ends, self._plan.window_requests - 1)[self._plan.window_requests - 1]
            )
        else:
            end = start + int(self._plan.window_seconds * 1e9)
            if now_ns < end:
                return False
        inside = self._ends <= end
        count = int(inside.sum())
        latency = float(self._latencies[inside].mean()) if count else 0.0
        self.windows.append((start, end, count / max(1, end - start) * 1e9, latency))
        self._ends, self._latencies = self._ends[~inside], self._latencies[~inside]
        self._start_ns = end
        return True
