"""Processes of a cluster with a queue in NATS: nats-server, workers and servers."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from cluster_server import MODEL
from eventually import wait_until
from free_port import free_port

needs_nats = pytest.mark.skipif(shutil.which("nats-server") is None, reason="needs nats-server")


class Process:
    """A process whose output is kept."""

    def __init__(self, *command: str | Path) -> None:
        self.process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGKILL, timeout: float = 60) -> int:
        """End the process; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            if number is signal.SIGKILL:
                self.process.send_signal(signal.SIGCONT)
        status = self.process.wait(timeout)
        self._reader.join(10)
        return status


class Nats:
    """A nats-server that can be killed and started again at the same place."""

    def __init__(self, directory: Path, *options: str, host: str = "127.0.0.1", prefix: Sequence[str] = ()):
        self._directory, self._options, self._host, self._prefix = directory, options, host, prefix
        self.port = free_port()
        self.url = f"nats://{host}:{self.port}"
        self.process: Process
        self.start()

    def start(self) -> None:
        place = ("-a", self._host, "-p", str(self.port), "-js", "-sd", str(self._directory))
        self.process = Process(*self._prefix, "nats-server", *place, *self._options)
        wait_until(lambda: "Server is ready" in self.process.output, 30)

    def listens(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection((self._host, self.port), 1).close()
            return True
        return False


def worker(url: str, name: str, *options: str, prefix: Sequence[str] = ()) -> Process:
    """Start a worker."""
    return Process(
        *(*prefix, sys.executable, "-m", "neso.cli", "worker", MODEL, "--join", url, "--name", name),
        *("--engine-config=num_blocks=256", *options),
    )


def status(url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `neso cluster status`."""
    command = [sys.executable, "-m", "neso.cli", "cluster", "status", "--join", url, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
