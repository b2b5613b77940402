"""The helper of the attacks itself."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.alone


def test_idle_server_answers_probes(identity_server):
    report = identity_server.attack(lambda: time.sleep(1), "idle")
    report.check()
    assert report.probes > 10
    assert report.memory_before > 10 << 20
