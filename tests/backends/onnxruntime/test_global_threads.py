"""The process-wide thread pool of ONNX Runtime sessions, with models that load in any order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx_models
import pytest

# In a separate process, since the pool applies to all later sessions of a process.
PROGRAM = """
import sys
from pathlib import Path
from tritonclient.grpc.model_config_pb2 import ModelConfig
from neso.backends.onnxruntime.session import open_session, read_signature
from neso.backends.tensor.model import Instance, InstanceKind
from neso.backends.tensor.model import Parameters

path, instance = Path(sys.argv[1]), Instance("m_0", InstanceKind.CPU, 0)

def session(settings):
    return open_session(path, ModelConfig(), Parameters(ModelConfig(), settings), instance)

open_ = {
    "signature": lambda: read_signature(path),
    "shared": lambda: session({"enable-global-threadpool": "1"}),
    "own": lambda: session({}),
}
for what in sys.argv[2:]:
    open_[what]()
"""


@pytest.mark.parametrize(
    "order", [("signature", "shared", "signature"), ("shared", "signature", "own"), ("own", "shared", "own")]
)
def test_sessions_open_in_any_order(order: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(onnx_models.linear())
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), *order], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
