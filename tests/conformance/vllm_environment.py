"""The Python that has real vLLM, its CPU build: ./neso-test sets it up beside the tests' own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = Path(
    os.environ.get("NESO_VLLM_PYTHON") or Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Several servers share few cores: no core is one's own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # What vLLM compiles at the first request for log probabilities takes as long as all tests together.
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": os.pathsep.join(
        filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    ),
}


def require_vllm() -> None:
    """Skip where real vLLM is not installed."""
    if not PYTHON.exists():
        pytest.skip(f"real vLLM is not installed ({PYTHON}): ./neso-test sets it up where there is a build")
    found = subprocess.run(
        [PYTHON, "-c", "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"],
        check=False,
    )
    if found.returncode:
        pytest.skip(f"{PYTHON} has no vLLM: there is no build for this machine")
