"""Ends vLLM's engine processes if the server is killed. Otherwise they would keep running and hold their memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

# Reads a pid per line until the server dismisses the program or dies (end of stdin). Uses pidfds if available, because
# pids can be reused.
_PROGRAM = """
import os, signal, sys, time

processes = []
for line in sys.stdin:
    if line == "dismiss\\n":
        sys.exit()
    pid = int(line)
    try:
        processes.append((pid, os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None))
    except OSError:
        pass
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
    """A child process that waits for the end of this process, then terminates the processes of `watch`."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        # In a new session, so that Ctrl-C in a terminal does not end it before the server.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def watch(self, pids: Iterable[int]) -> None:
        """Add processes to those that are terminated."""
        assert self._process.stdin is not None
        new = set(pids) - self._watched
        self._watched |= new
        try:
            self._process.stdin.write("".join(f"{pid}\n" for pid in new))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed

    def dismiss(self) -> None:
        """End the child process without terminating the processes."""
        try:
            self._process.communicate("dismiss\n", timeout=5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
