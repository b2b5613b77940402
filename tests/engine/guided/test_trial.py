"""The process in which grammars are tried."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
from llguidance import LLMatcher

from neso.engine.guided.grammar import GrammarError
from neso.engine.guided.token_table import TokenTable
from neso.engine.guided.trial import Trial

TABLE = TokenTable([bytes([byte]) for byte in range(256)], [])
ENDLESS = LLMatcher.grammar_from_lark('start: %json {"type": "integer", "multipleOf": 999983}')
FINE = LLMatcher.grammar_from_lark("start: /[a-z]+/")


@pytest.fixture
def trial():
    trial = Trial(TABLE, timeout=60.0)
    yield trial
    trial.close()


def child(trial: Trial) -> psutil.Process:
    assert trial._process is not None
    return psutil.Process(trial._process.pid)


def test_one_process_for_many_grammars(trial: Trial) -> None:
    trial.check(FINE)
    first = child(trial)
    trial.check(FINE)
    with pytest.raises(GrammarError, match="unclosed group"):
        trial.check(LLMatcher.grammar_from_regex("a(b"))
    assert child(trial) == first and first.is_running()


def test_what_takes_too_long_is_ended(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    trial.check(FINE)
    monkeypatch.setattr(trial, "_timeout", 1.0)
    first, started = child(trial), time.monotonic()
    with pytest.raises(GrammarError, match="not compiled within 1 seconds"):
        trial.check(ENDLESS)
    assert time.monotonic() - started >= 1
    assert not first.is_running()
    monkeypatch.undo()
    trial.check(FINE)


def test_an_answer_in_the_last_moment(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process for the next grammar is not ended for it."""

    class LateTimer(threading.Timer):
        def cancel(self) -> None:
            super().cancel()
            self.function()

    trial.check(FINE)
    first = child(trial)
    monkeypatch.setattr(threading, "Timer", LateTimer)
    for _ in range(3):
        trial.check(FINE)
    assert child(trial) == first and first.is_running()


def test_a_crash_is_an_error(trial: Trial) -> None:
    trial.check(FINE)
    child(trial).kill()
    with pytest.raises(GrammarError, match="too complex"):
        trial.check(FINE)
    trial.check(FINE)


def test_it_ends_by_itself_when_nobody_is_there() -> None:
    """Though it is within a grammar that takes for ever."""
    trial = Trial(TABLE, timeout=1.0)
    trial.check(FINE)
    process, left = child(trial), trial._process
    assert left is not None and left.stdin is not None and left.stdout is not None
    from neso.engine.guided.trial_process import write_frame

    write_frame(left.stdin, ENDLESS.encode())
    left.stdin.close()
    assert left.wait(timeout=60) < 0, "by a signal"
    left.stdout.close()
    trial._process = None
    assert not process.is_running()
