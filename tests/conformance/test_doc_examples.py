"""The examples of the README and the quickstart, run as they stand against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/openai.md",
    "docs/responses.md",
    "docs/kserve-http.md",
    "docs/kserve-grpc.md",
    "docs/guided-decoding.md",
    "docs/embeddings.md",
    "docs/prompt-embeddings.md",
)
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
DEFAULT_PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002, "openai": 9000}

IDENTITY_CONFIG = """
backend: "python"
max_batch_size: 8
input [{ name: "INPUT", data_type: TYPE_FP32, dims: [-1] }]
output [{ name: "OUTPUT", data_type: TYPE_FP32, dims: [-1] }]
"""
IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array)]) for array in inputs]
"""


def examples() -> list:
    found = []
    for page in PAGES:
        for language, code in BLOCK.findall((ROOT / page).read_text()):
            # The set-up commands are tried on a clean machine, not within the tests that they run.
            if "./neso-" not in code:
                number = sum(p.id.startswith(page) for p in found)
                found.append(pytest.param(language, code, id=f"{page}-{number}"))
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The shipped model, and the identity that the pages on tensors use."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "identity" / "1").mkdir(parents=True)
    (repository / "identity" / "config.pbtxt").write_text(IDENTITY_CONFIG)
    (repository / "identity" / "1" / "model.py").write_text(IDENTITY)
    arguments = ("neso-pilot", f"--model-repository={repository}", "--allow-client-shm=true")
    with ServerProcess(*arguments) as server:
        yield server


@pytest.mark.parametrize(("language", "code"), examples())
def test_example(served, language, code):
    for name, port in DEFAULT_PORTS.items():
        code = code.replace(f"localhost:{port}", served.address(name))
    command = (
        [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    )
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONWARNINGS": "error"}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert '"error"' not in result.stdout
