"""The progress bar of loading a model."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest

from neso.engine.runners.loading_progress import PATIENCE, show_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def items(count: int, seconds: float, clock: list[float]) -> Iterator[int]:
    for number in range(count):
        clock[0] += seconds
        yield number


def test_long_loads_have_a_bar_that_is_cleared(clock: list[float]) -> None:
    out = Terminal()
    assert list(show_progress(items(4, PATIENCE, clock), 4, "packing", out)) == [0, 1, 2, 3]
    lines = out.getvalue().split("\r\x1b[K")
    assert lines[2] == f"packing {'█' * 15}{'░' * 15}  50%, about {2 * PATIENCE:.0f} s left"
    assert lines[-1] == ""


def test_short_loads_and_other_outputs_have_none(clock: list[float]) -> None:
    terminal, file = Terminal(), io.StringIO()
    assert list(show_progress(items(4, PATIENCE / 8, clock), 4, "packing", terminal)) == [0, 1, 2, 3]
    assert list(show_progress(items(4, PATIENCE, clock), 4, "packing", file)) == [0, 1, 2, 3]
    assert terminal.getvalue() == file.getvalue() == ""


def test_the_bar_is_cleared_after_a_failure(clock: list[float]) -> None:
    def failing() -> Iterator[int]:
        yield from items(2, PATIENCE, clock)
        raise ValueError("broken file")

    out = Terminal()
    with pytest.raises(ValueError, match="broken file"):
        list(show_progress(failing(), 4, "packing", out))
    assert out.getvalue().endswith("\r\x1b[K")
