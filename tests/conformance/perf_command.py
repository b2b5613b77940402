"""The command `neso perf profile` and its files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUESTS = 24


def perf(url: str, folder: Path, model: str, endpoint: str, *options: str, status: int = 0) -> dict[str, Any]:
    """Run `neso perf profile` and return its figures; its output under "output" if it is to fail."""
    done = subprocess.run(
        [sys.executable, "-m", "neso.cli", "perf", "profile", "-m", model, "-u", url, "--endpoint-type", endpoint,
         "--request-count", str(REQUESTS), "--artifact-dir", str(folder), "--ui", "none", "--no-report",
         "--no-server-metrics", "--no-telemetry", *options],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    if status:
        return {"output": done.stdout + done.stderr}
    (export,) = folder.rglob("profile_export_genai_perf.json")
    figures: dict[str, Any] = json.loads(export.read_text())
    assert figures["request_count"]["avg"] == REQUESTS and not figures["errors"], figures["errors"]
    return figures


def requests_of(folder: Path) -> list[dict[str, Any]]:
    (lines,) = folder.rglob("profile_export.jsonl")
    return [json.loads(line) for line in lines.read_text().splitlines()]
