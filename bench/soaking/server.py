"""A `neso serve` process, and what it holds of the machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

_PORT = re.compile(r"  (http|grpc|metrics)\s+(\d+)")


@dataclass(frozen=True)
class Holdings:
    """Of the server and its child processes together. `seconds` since it was ready; `rss` in MiB."""

    seconds: float
    rss: float
    fds: int
    threads: int
    processes: int
    shm: int


class SoakedServer:
    """Runs until the end of the `with` block of `start`."""

    def __init__(self, process: subprocess.Popen[str], ports: dict[str, int]) -> None:
        self.ports = ports
        self._process = process
        self._ready = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def url(self, path: str, protocol: str = "http") -> str:
        return f"http://127.0.0.1:{self.ports[protocol]}{path}"

    def holdings(self) -> Holdings:
        """What it holds now. Raises `psutil.NoSuchProcess` if it has died."""
        server = psutil.Process(self.pid)
        rss = fds = threads = count = 0
        for process in (server, *server.children(recursive=True)):
            try:
                with process.oneshot():
                    rss += process.memory_info().rss
                    fds += process.num_fds()
                    threads += process.num_threads()
                    count += 1
            except psutil.NoSuchProcess:  # a child that ended meanwhile
                if process is server:
                    raise
        shm = sum(1 for _ in Path("/dev/shm").iterdir())
        return Holdings(time.monotonic() - self._ready, rss / 2**20, fds, threads, count, shm)


@contextmanager
def start(repository: Path, log: Path) -> Iterator[SoakedServer]:
    """Serve the repository with explicit model control and shared memory; stopped at the end."""
    command = [sys.executable, "-m", "neso.cli", "serve", "--model-repository", str(repository)]
    command += ["--model-control-mode=explicit", "--load-model=*", "--allow-client-shm=true"]
    command += [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    command += [f"--{name}-address=127.0.0.1" for name in ("http", "grpc", "metrics", "openai")]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            yield SoakedServer(process, _read_ports(process))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read_ports(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdout is not None
    ports: dict[str, int] = {}
    for line in process.stdout:
        if match := _PORT.match(line):
            ports[match.group(1)] = int(match.group(2))
        if line.startswith("Neso is ready"):
            return ports
    raise RuntimeError("the server did not start")
