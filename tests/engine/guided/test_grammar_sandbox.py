"""The process in which grammars are checked."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
from llguidance import LLMatcher

from neso.engine.guided.grammar import GrammarError
from neso.engine.guided.grammar_sandbox import GrammarSandbox
from neso.engine.guided.token_table import TokenTable

TABLE = TokenTable([bytes([byte]) for byte in range(256)], [])
ENDLESS = LLMatcher.grammar_from_lark('start: %json {"type": "integer", "multipleOf": 999983}')
FINE = LLMatcher.grammar_from_lark("start: /[a-z]+/")


@pytest.fixture
def sandbox():
    sandbox = GrammarSandbox(TABLE, timeout=60.0)
    yield sandbox
    sandbox.close()


def child(sandbox: GrammarSandbox) -> psutil.Process:
    assert sandbox._process is not None
    return psutil.Process(sandbox._process.pid)


def test_one_process_for_many_grammars(sandbox: GrammarSandbox) -> None:
    sandbox.check(FINE)
    first = child(sandbox)
    sandbox.check(FINE)
    with pytest.raises(GrammarError, match="unclosed group"):
        sandbox.check(LLMatcher.grammar_from_regex("a(b"))
    assert child(sandbox) == first and first.is_running()


def test_slow_grammar_is_rejected_and_process_killed(
    sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox.check(FINE)
    monkeypatch.setattr(sandbox, "_timeout", 1.0)
    first, started = child(sandbox), time.monotonic()
    with pytest.raises(GrammarError, match="not compiled within 1 seconds"):
        sandbox.check(ENDLESS)
    assert time.monotonic() - started >= 1
    assert not first.is_running()
    monkeypatch.undo()
    sandbox.check(FINE)


def test_reply_at_the_deadline_keeps_the_process(
    sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateTimer(threading.Timer):
        def cancel(self) -> None:
            super().cancel()
            self.function()

    sandbox.check(FINE)
    first = child(sandbox)
    monkeypatch.setattr(threading, "Timer", LateTimer)
    for _ in range(3):
        sandbox.check(FINE)
    assert child(sandbox) == first and first.is_running()


def test_a_crash_is_an_error(sandbox: GrammarSandbox) -> None:
    sandbox.check(FINE)
    child(sandbox).kill()
    with pytest.raises(GrammarError, match="too complex"):
        sandbox.check(FINE)
    sandbox.check(FINE)


def test_process_ends_without_its_client() -> None:
    """Also while it checks a grammar that never finishes."""
    sandbox = GrammarSandbox(TABLE, timeout=1.0)
    sandbox.check(FINE)
    process, left = child(sandbox), sandbox._process
    assert left is not None and left.stdin is not None and left.stdout is not None
    from neso.engine.guided.sandbox_process import write_frame

    write_frame(left.stdin, ENDLESS.encode())
    left.stdin.close()
    assert left.wait(timeout=60) < 0, "by a signal"
    left.stdout.close()
    sandbox._process = None
    assert not process.is_running()
