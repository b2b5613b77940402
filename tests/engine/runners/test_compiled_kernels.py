"""The Triton kernels compile for GPUs that this machine need not have, within their registers and shared memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton")

BENCH = Path(__file__).parents[3] / "bench" / "gpu_kernels.py"
MODELS = ("Gemma 2 9B", "Qwen 3 30B A3B", "quantized matrices")
SMALLEST_SHARED_MEMORY = 99 * 1024
"""What a thread block may have on the GPUs with the least: compute capability 8.6, 8.9 and 12.0."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_once_for_each_kind_of_step(tmp_path: Path) -> None:
    # In a process of its own, because in this one the kernels are interpreted.
    report = tmp_path / "kernels.json"
    options = ["--targets", "80,90,100", "--models", ",".join(MODELS), "--steps", "20", "--json", str(report)]
    done = subprocess.run([sys.executable, BENCH, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert set(found["added"].values()) == {0}, found["added"]
    # On GPUs that do not multiply float8, nothing is rounded to it.
    assert found["left_out"] == {"80": ["_round_chunks", "_round_rows"], "90": [], "100": []}
    for kernel in found["kernels"]:
        assert kernel["stack"] <= (64 if kernel["name"] == "_attend_tile" else 8), kernel
        assert kernel["shared"] <= SMALLEST_SHARED_MEMORY, kernel
    # Prefill, decode and tree; twice in a model with two kinds of layers.
    tiles = Counter((k["model"], k["target"]) for k in found["kernels"] if k["name"] == "_attend_tile")
    assert set(tiles.values()) <= {3, 4, 6}, tiles
    assert {target for _, target in tiles} == {80, 90, 100}
