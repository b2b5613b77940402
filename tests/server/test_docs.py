"""The examples in the documentation work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

# A block after a line "`path`:" is that file, any other Python block is run beside the files.
BLOCK = re.compile(r"(?:^`(?P<path>[^`\n]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


@pytest.mark.parametrize(
    "name",
    [
        "in-process.md",
        "python-backend.md",
        "model-management.md",
        "python-process-mode.md",
        "model-repository.md",
        "engine-directories.md",
        "ensembles.md",
        "sequences.md",
        "rate-limiter.md",
        "onnxruntime-backend.md",
        "pytorch-backend.md",
        "tritonserver-shim.md",
        "tracing.md",
        "speculative-decoding.md",
    ],
)
def test_examples(name, tmp_path):
    ran = 0
    for block in BLOCK.finditer((DOCS / name).read_text()):
        if block["path"]:
            path = tmp_path / block["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["text"])
        elif block["language"] == "python":
            subprocess.run([sys.executable, "-c", block["text"]], check=True, cwd=tmp_path, timeout=110)
            ran += 1
    assert ran
