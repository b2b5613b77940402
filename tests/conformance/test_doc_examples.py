"""The examples of the README and the quickstart, run unchanged against a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from doc_reader import at_addresses, blocks
from server_process import ServerProcess

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/reference/openai.md",
    "docs/reference/responses.md",
    "docs/guides/tool-calling.md",
    "docs/guides/reasoning.md",
    "docs/reference/kserve-http.md",
    "docs/reference/kserve-grpc.md",
    "docs/guides/guided-decoding.md",
    "docs/guides/embeddings.md",
    "docs/guides/prompt-embeddings.md",
)

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
    """Return language, code, and the block with the expected output, if any."""
    found = []
    for page in PAGES:
        read = [*blocks((ROOT / page).read_text()), None]
        for block, following in pairwise(read):
            # The setup commands are tested on a clean machine, not here.
            if block is None or block.path is not None or block.language not in ("bash", "python"):
                continue
            if "./neso-" in block.text:
                continue
            response = following if following is not None and following.is_answer else None
            number = sum(p.id.startswith(page) for p in found)
            found.append(pytest.param(block.language, block.text, response, id=f"{page}-{number}"))
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The bundled model, and the identity model that the pages on tensors use."""
    repository = tmp_path_factory.mktemp("repository")
    (repository / "identity" / "1").mkdir(parents=True)
    (repository / "identity" / "config.pbtxt").write_text(IDENTITY_CONFIG)
    (repository / "identity" / "1" / "model.py").write_text(IDENTITY)
    arguments = ("neso-pilot", f"--model-repository={repository}", "--allow-client-shm=true")
    with ServerProcess(*arguments) as server:
        yield server


@pytest.mark.parametrize(("language", "code", "response"), examples())
def test_example(served, language, code, response):
    code = at_addresses(code, served)
    command = (
        [sys.executable, "-c", code] if language == "python" else ["bash", "-euo", "pipefail", "-c", code]
    )
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=110, env={**os.environ, "PYTHONWARNINGS": "error"}
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert '"error"' not in result.stdout
    if response is not None:
        response.check(result.stdout)
