"""Runs a server in a process, to measure its CPU time apart from that of its client."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process that listens on `port` when it has started."""

    port: int
    pid: int | None

    def cpu_seconds(self) -> float:
        """CPU time used by the process."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def server_process(serve: Callable[[str, int], None], kind: str) -> Iterator[ServerProcess]:
    """Run `serve(kind, port)` in a process, which is killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(kind, port), daemon=True)
    process.start()
    try:
        yield ServerProcess(port, process.pid)
    finally:
        process.kill()
        process.join()
