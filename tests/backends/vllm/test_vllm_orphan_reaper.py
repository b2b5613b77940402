"""The orphan reaper ends engine processes of a killed server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

# A server with an engine, which is a process in a separate session.
SERVER = """
import subprocess, sys, time
from neso.backends.vllm.orphan_reaper import OrphanReaper

engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
guardian = OrphanReaper()
guardian.watch([engine.pid])
guardian.watch([engine.pid, engine.pid + 10**8])  # one is known, one does not exist
print(engine.pid, flush=True)
if sys.stdin.readline() == "dismiss\\n":
    guardian.dismiss()
    print("dismissed", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process
        process.kill()


def test_engine_is_ended_when_the_server_is_killed(server):
    assert server.stdout is not None
    engine = psutil.Process(int(server.stdout.readline()))
    server.kill()
    gone, _ = psutil.wait_procs([engine], timeout=60)
    assert gone


def test_dismissed_reaper_does_not_end_processes(server):
    assert server.stdin is not None and server.stdout is not None
    engine = psutil.Process(int(server.stdout.readline()))
    server.stdin.write("dismiss\n")
    server.stdin.flush()
    assert server.stdout.readline() == "dismissed\n"
    assert psutil.Process(server.pid).children(recursive=True) == [engine]
    server.kill()
    server.wait()
    time.sleep(0.5)
    assert engine.is_running()
    engine.kill()
