"""Engines that take their time."""

from __future__ import annotations

import time
from typing import Any

import pytest


class StepPace:
    """`seconds` that each step of an engine in this process takes longer than it would; a test may change it."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
        from neso.engine.runners.native.runner import NativeRunner
        from neso.engine.runners.reference.runner import ReferenceRunner

        self.seconds = seconds
        for kind in (NativeRunner, ReferenceRunner):
            patch.setattr(kind, "step", self._slow(kind.step))

    def _slow(self, step: Any) -> Any:
        def slow(runner: Any, plan: Any) -> Any:
            time.sleep(self.seconds)
            return step(runner, plan)

        return slow
