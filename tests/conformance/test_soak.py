"""A short soak test: bench/soak.py for some seconds, and its report for a leaking server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from soak import leaks
from soaking.server import ResourceUsage

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(240)
def test_soak_loses_and_leaks_nothing():
    command = [sys.executable, str(SOAK), "--minutes", "0.35", "--kill-secs", "6"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no errors, no leaks" in result.stdout


def readings(**growth: float) -> list[ResourceUsage]:
    """Readings of one minute; the named values grow by the given amount per second."""
    base = {"rss": 200, "server_rss": 100, "fds": 50, "threads": 30, "processes": 2, "shm": 1}
    return [
        ResourceUsage(
            seconds, **{name: start + int(growth.get(name, 0) * seconds) for name, start in base.items()}
        )
        for seconds in range(60)
    ]


@pytest.mark.parametrize("name", ["rss", "server_rss", "fds", "threads", "processes", "shm"])
def test_soak_detects_leaks(name):
    assert leaks(readings()) == []
    (found,) = leaks(readings(**{name: 1.0}))
    assert ("memory" if "rss" in name else name) in found
