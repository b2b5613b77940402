"""Engines that take their time."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# Python runs it at the start of each child.
_SITECUSTOMIZE = """
import time
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.reference.runner import ReferenceRunner

def slow(step):
    def slower(runner, plan):
        time.sleep({seconds})
        return step(runner, plan)
    return slower

for kind in (NativeRunner, ReferenceRunner):
    kind.step = slow(kind.step)
"""


def slow_children(patch: pytest.MonkeyPatch, folder: Path, seconds: float = 0.05) -> None:
    """As StepPace, for engines in processes that are started after this; the folder is the test's own."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(seconds=seconds))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, sys.path)]))


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
