"""Runs bench/stub_server.py in a process."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from eventually import wait_until
from free_port import free_port

SCRIPT = Path(__file__).parents[1] / "bench" / "stub_server.py"


class StubProcess:
    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen([sys.executable, str(SCRIPT), str(self.port), *arguments])
        wait_until(self._listens)

    def _listens(self) -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def stub_process(*arguments: str) -> Iterator[StubProcess]:
    """A server that responds with words; see the script for its arguments."""
    stub = StubProcess(*arguments)
    try:
        yield stub
    finally:
        stub.kill()
