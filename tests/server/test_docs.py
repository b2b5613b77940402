"""Examples of the documentation."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"

# A block after a line "`path`:" is that file; other Python blocks are run in the folder of the files.
BLOCK = re.compile(r"(?:^`(?P<path>[^`\n]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)


@pytest.mark.parametrize(
    "name",
    [
        "guides/cluster-api.md",
        "guides/in-process.md",
        "guides/python-backend.md",
        "guides/model-management.md",
        "guides/python-process-mode.md",
        "reference/model-repository.md",
        "guides/engine-directories.md",
        "guides/ensembles.md",
        "guides/sequences.md",
        "guides/rate-limiter.md",
        "guides/onnxruntime-backend.md",
        "guides/openvino-backend.md",
        "guides/pytorch-backend.md",
        "guides/tensorflow-backend.md",
        "guides/tritonserver-shim.md",
        "guides/tracing.md",
        "guides/speculative-decoding.md",
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
