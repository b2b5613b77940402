"""Starts `neso serve` in a process, on free ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

NESO = (sys.executable, "-m", "neso.cli")
FRONTENDS = ("http", "grpc", "metrics", "openai")
_PORT = re.compile(rf"  ({'|'.join(FRONTENDS)})\s+(\d+)")


@dataclass(frozen=True)
class NesoServer:
    """`ports` by frontend."""

    process: subprocess.Popen[str]
    ports: dict[str, int]


@contextmanager
def served(*arguments: str, log: Path | None = None) -> Iterator[NesoServer]:
    """Start a server, wait until it is ready, and stop it at the end. `log`: file of its log.

    Raises `RuntimeError` if the server does not become ready.
    """
    command = [*NESO, "serve", *arguments, *(f"--{name}-port=0" for name in FRONTENDS)]
    with open(log or os.devnull, "w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield NesoServer(process, _read_ports(process))
    finally:
        process.terminate()
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
            ports[match[1]] = int(match[2])
        if line.startswith("Neso is ready"):
            return ports
    raise RuntimeError("the server did not start")
