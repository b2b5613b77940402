"""The Python environment with vLLM (CPU build), which `./neso-test --all` installs."""

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
    # Several servers share the cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Compiling the kernels for log probabilities takes as long as all of these tests together.
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": os.pathsep.join(
        filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")))
    ),
}


def require_vllm() -> None:
    """Skip the test if vLLM is not installed."""
    if not PYTHON.exists():
        pytest.skip(f"real vLLM is not installed ({PYTHON}): run ./neso-test --all")
    found = subprocess.run(
        [PYTHON, "-c", "import importlib.util as u; raise SystemExit(u.find_spec('vllm') is None)"],
        check=False,
    )
    if found.returncode:
        pytest.skip(f"{PYTHON} has no vLLM: run ./neso-test --all")
