"""Tests that the default tier skips because they are slow, listed in slow_tests.txt.

    ./neso-test --all --write-slow-tests 2 -n 3 --dist loadfile --no-loadscope-reorder

runs all tests and rewrites the list with those that took more than 2 seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow_tests.txt")


def listed() -> frozenset[str]:
    """Return the node ids of the listed tests."""
    return frozenset(LIST.read_text().splitlines())


def mark_listed_slow(items: Sequence[pytest.Item]) -> None:
    """Mark the listed tests as slow."""
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


class SlowTestsWriter:
    """Plugin that writes the list when the session ends. Tests that were not run keep their entries."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._durations: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._durations[report.nodeid] = report.duration

    def pytest_sessionfinish(self) -> None:
        kept = listed() - self._durations.keys()
        slow = {name for name, duration in self._durations.items() if duration > self._seconds}
        LIST.write_text("".join(f"{name}\n" for name in sorted(kept | slow)))
