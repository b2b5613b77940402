"""Ends vLLM's engine processes if the server is killed. Otherwise they would keep running and hold their memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

# Reads stdin until the server dismisses the program or dies (empty input). Uses pidfds if available, because pids can
# be reused.
_PROGRAM = """
import os, signal, sys, time

processes = []
for pid in map(int, sys.argv[1:]):
    try:
        processes.append((pid, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None))
    except OSError:
        pass
if not sys.stdin.buffer.read():
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, pidfd in processes:
            try:
                if pidfd is None:
                    os.kill(pid, number)
                else:
                    signal.pidfd_send_signal(pidfd, number)
            except OSError:
                pass
        time.sleep(5)
"""


class OrphanReaper:
    """A child process that waits for the end of this process, then terminates the processes `pids`."""

    def __init__(self, pids: Iterable[int]) -> None:
        # In a new session, so that Ctrl-C in a terminal does not end it before the server.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, pids)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the child process without terminating the processes `pids`."""
        try:
            self._process.communicate(b"dismiss", timeout=5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
