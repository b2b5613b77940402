"""The commands of genai-perf, perf_analyzer and aiperf, if they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def tool(name: str) -> str:
    """Return the path of a command, in NESO_PERF_TOOLS/bin or on PATH; skip the test without it."""
    folder = os.environ.get("NESO_PERF_TOOLS")
    found = shutil.which(name, path=f"{folder}/bin{os.pathsep}{os.environ['PATH']}" if folder else None)
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor in NESO_PERF_TOOLS/bin: see bench/install_perf_tools.sh")
    return found


def run(command: list[str], **environment: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
