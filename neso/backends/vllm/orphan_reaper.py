"""Ends vLLM's engines when the server ends without a word: by themselves they would live on, with all their memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

# Reads until the server says that all is well, or is gone. A process is held by a descriptor, where there are such:
# its number may be another's by then.
_PROGRAM = """
import os, signal, sys, time

held = []
for number in map(int, sys.argv[1:]):
    try:
        held.append((number, os.pidfd_open(number) if hasattr(os, "pidfd_open") else None))
    except OSError:
        pass
if not sys.stdin.buffer.read():
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for number, descriptor in held:
            try:
                if descriptor is None:
                    os.kill(number, sent)
                else:
                    signal.pidfd_send_signal(descriptor, sent)
            except OSError:
                pass
        time.sleep(5)
"""


class Guardian:
    """A small process that waits for the end of this one, and ends others then."""

    def __init__(self, pids: Iterable[int]) -> None:
        # In a session of its own: Ctrl-C in a terminal is for the server, which ends its engines itself.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, pids)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """The others have ended, or are somebody else's now."""
        try:
            self._process.communicate(b"all is well", timeout=5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
