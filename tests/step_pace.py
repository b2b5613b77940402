"""Engines that take their time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.reference.runner import ReferenceRunner

if TYPE_CHECKING:
    import pytest

RUNNERS = (NativeRunner, ReferenceRunner)
# Python runs it at the start of each child.
_SITECUSTOMIZE = """
from step_pace import RUNNERS, slowed

for kind in RUNNERS:
    kind.step = slowed(kind.step, lambda: {seconds})
"""


def slowed(step: Any, seconds: Callable[[], float]) -> Any:
    """A runner's `step` that takes so much longer."""

    def slow(runner: Any, plan: Any) -> Any:
        time.sleep(seconds())
        return step(runner, plan)

    return slow


def slow_environment(folder: Path, seconds: float = 0.05) -> dict[str, str]:
    """As StepPace, for engines in processes that have these variables; the folder is the test's own."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(seconds=seconds))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def slow_children(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """`slow_environment` for all processes that are started after this."""
    for name, value in slow_environment(folder).items():
        patch.setenv(name, value)


class StepPace:
    """`seconds` that each step of an engine in this process takes longer than it would; a test may change it."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
        self.seconds = seconds
        for kind in RUNNERS:
            patch.setattr(kind, "step", slowed(kind.step, lambda: self.seconds))
