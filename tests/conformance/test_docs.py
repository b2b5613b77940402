"""The examples of the README and the quickstart, run as they stand against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "openai": 9000}


def examples() -> list:
    found = []
    for page in PAGES:
        for language, code in BLOCK.findall((ROOT / page).read_text()):
            # The set-up commands are tried on a clean machine, not within the tests that they run.
            if "./neso-" not in code:
                number = sum(p.id.startswith(page) for p in found)
                found.append(pytest.param(language, code, id=f"{page}-{number}"))
    return found


@pytest.mark.parametrize(("language", "code"), examples())
def test_example(server, language, code):
    for name, port in DEFAULT_PORTS.items():
        code = code.replace(f"localhost:{port}", server.address(name))
    command = (
        [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    )
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONWARNINGS": "error"}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert '"error"' not in result.stdout
