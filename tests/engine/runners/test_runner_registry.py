from __future__ import annotations

import pytest

from neso.engine.runners import registry
from neso.engine.runners.native.runner import NativeRunner
from neso.engine.runners.reference.runner import ReferenceRunner
from neso.engine.runners.registry import UnknownRunner, runner_class


def test_unknown_names() -> None:
    assert runner_class("auto") is NativeRunner
    assert runner_class("reference") is ReferenceRunner
    with pytest.raises(UnknownRunner, match="reference"):
        runner_class("gpu")


def test_auto_selects_the_first_importable_runner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = {"absent": ("neso.engine.runners.absent", "Absent")}
    monkeypatch.setattr(registry, "RUNNERS", {**missing, "reference": registry.RUNNERS["reference"]})
    assert runner_class("auto") is ReferenceRunner
    assert "the runner absent cannot run here" in caplog.text
    with pytest.raises(UnknownRunner, match="absent"):
        runner_class("absent")
