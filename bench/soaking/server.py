"""A `neso serve` process and its resource usage."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from neso_server import FRONTENDS, NesoServer, served

SHM_PREFIX = f"neso_soak_{os.getpid()}_"
"""Prefix of the shared-memory regions of this run. Other programs on the machine have their own."""


@dataclass(frozen=True)
class ResourceUsage:
    """Resources of the server and its child processes. `shm`: shared-memory regions of the clients.

    `seconds`: time since the server became ready; `rss`: in MiB, `server_rss`: without the child processes.
    """

    seconds: float
    rss: float
    server_rss: float
    fds: int
    threads: int
    processes: int
    shm: int


class SoakServer:
    """A server that runs until the end of the `with` block of `start`."""

    def __init__(self, server: NesoServer) -> None:
        self.ports = server.ports
        self._process = server.process
        self._ready = time.monotonic()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def url(self, path: str, protocol: str = "http") -> str:
        return f"http://127.0.0.1:{self.ports[protocol]}{path}"

    def resource_usage(self) -> ResourceUsage:
        """Current resource usage. Raises `psutil.NoSuchProcess` if the server has exited."""
        server = psutil.Process(self.pid)
        rss = own = fds = threads = count = 0
        for process in (server, *server.children(recursive=True)):
            try:
                with process.oneshot():
                    rss += process.memory_info().rss
                    own = own or rss  # the server is the first
                    fds += process.num_fds()
                    threads += process.num_threads()
                    count += 1
            except psutil.NoSuchProcess:  # a child that has exited
                if process is server:
                    raise
        shm = sum(1 for file in Path("/dev/shm").iterdir() if file.name.startswith(SHM_PREFIX))
        return ResourceUsage(
            time.monotonic() - self._ready, rss / 2**20, own / 2**20, fds, threads, count, shm
        )


@contextmanager
def start(repository: Path, log: Path) -> Iterator[SoakServer]:
    """Serve the repository with explicit model control and shared memory."""
    options = [f"--model-repository={repository}", "--model-control-mode=explicit", "--load-model=*"]
    options += ["--allow-client-shm=true", *(f"--{name}-address=127.0.0.1" for name in FRONTENDS)]
    with served(*options, log=log) as server:
        yield SoakServer(server)
