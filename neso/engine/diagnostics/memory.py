"""Memory use of the engine process and its device."""

from __future__ import annotations

import os
import time
from pathlib import Path

from neso.engine.runners.base import Runner

INTERVAL = 1.0
"""Seconds between two readings, which take longer than all other statistics of a step."""


class MemoryUse:
    """Bytes used by this process, and by its runner on the device."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._read_at = float("-inf")
        self.host = self.device = 0

    def refresh(self) -> None:
        """Read again if the last reading is older than `INTERVAL`."""
        now = time.monotonic()
        if now - self._read_at >= INTERVAL:
            self._read_at = now
            self.host, self.device = _resident_bytes(), self._runner.device_memory()


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
