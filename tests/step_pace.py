"""Engines with slow steps."""

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
# Python imports this module when a child process starts.
_SITECUSTOMIZE = """
from step_pace import RUNNERS, slowed

for kind in RUNNERS:
    kind.step = slowed(kind.step, lambda: {seconds})
"""


def slowed(step: Any, seconds: Callable[[], float]) -> Any:
    """Return a runner's `step` that takes the given number of seconds longer."""

    def slow(runner: Any, plan: Any) -> Any:
        time.sleep(seconds())
        return step(runner, plan)

    return slow


def slow_environment(folder: Path, seconds: float = 0.05) -> dict[str, str]:
    """Return environment variables that slow down engine processes. `folder` must belong to the test."""
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(seconds=seconds))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def slow_children(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Apply `slow_environment` to all processes started after this call."""
    for name, value in slow_environment(folder).items():
        patch.setenv(name, value)


class StepPace:
    """Adds `seconds` to each step of engines in this process. Tests may change the value."""

    def __init__(self, patch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
        self.seconds = seconds
        for kind in RUNNERS:
            patch.setattr(kind, "step", slowed(kind.step, lambda: self.seconds))
