"""The helper of the attacks itself."""

from __future__ import annotations

import os
import signal
import time

import pytest

pytestmark = pytest.mark.alone


def test_idle_server_answers_probes(identity_server):
    report = identity_server.attack(lambda: time.sleep(1), "idle")
    report.check()
    assert report.probes > 10
    assert report.memory_before > 10 << 20


def test_blocked_server_is_noticed(identity_server):
    """Although the time that its threads wait for a core is subtracted."""

    def block() -> None:
        os.kill(identity_server.process.pid, signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(identity_server.process.pid, signal.SIGCONT)

    report = identity_server.attack(block, "stopped process")
    assert report.longest > 0.3 and not report.responsive
