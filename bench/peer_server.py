"""Starts and stops servers under comparison."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path

NESO_PORT = 19000


@dataclass(frozen=True)
class RunningServer:
    """`start_seconds`: from the start of the process to its first response."""

    name: str
    url: str
    model: str
    start_seconds: float
    pid: int


@contextmanager
def serve(
    name: str,
    command: list[str],
    url: str,
    model: str,
    *,
    environment: dict[str, str] | None = None,
    probe: str = "/v1/models",
) -> Iterator[RunningServer]:
    """Start a server and wait until GET `probe` succeeds, and lists models if it is /v1/models.

    Raises `RuntimeError` if the port is in use, or the server exits or does not respond within ten minutes.
    """
    if _responds(url + probe):
        raise RuntimeError(f"another server responds at {url} and would be measured instead of {name}")
    log = Path(tempfile.gettempdir()) / f"bench-{name}.log"
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not _responds(url + probe):
            if process.poll() is not None or time.perf_counter() - started > 600:
                raise RuntimeError(f"{name} does not start; see {log}")
            time.sleep(0.02)
        yield RunningServer(name, url, model, time.perf_counter() - started, process.pid)
    finally:
        # The process group includes vLLM's engine process.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def neso(model: Path, *options: str, program: Path | None = None, port: int = NESO_PORT):  # type: ignore[no-untyped-def]
    """Run `neso serve` with its OpenAI port only. `program`: that of another environment."""
    command = [
        str(program or Path(sys.executable).with_name("neso")),
        "serve",
        f"model={model}",
        "--openai-port",
        str(port),
        "--allow-http=false",
        "--allow-grpc=false",
        "--allow-metrics=false",
        *options,
    ]
    return serve("neso", command, f"http://127.0.0.1:{port}", "model")


def _responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            body = response.read()
            return bool(response.status == 200 and (b'"id"' in body or not url.endswith("/models")))
    except (urllib.error.URLError, OSError):
        return False


def machine() -> str:
    """Date and CPU, for the header of a report."""
    model = platform.processor() or "unknown CPU"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    return f"{date.today()}, {os.cpu_count()} x {model}"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process group; shared pages are counted once (PSS)."""
    total = 0
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            group = os.getpgid(int(directory.name))
            if group == os.getpgid(pid):
                rollup = (directory / "smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total * 1024
