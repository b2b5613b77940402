"""CUDA shared memory with `tritonclient`'s utilities, against a server process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from neso.server.shared_memory.cuda import CudaDriver

pytest.importorskip("cuda.bindings.runtime", reason="tritonclient's CUDA shared memory needs cuda-python")
pytestmark = pytest.mark.skipif(CudaDriver.load() is None, reason="there is no GPU")

sys.path.append(str(Path(__file__).parents[1] / "conformance"))


@pytest.mark.parametrize(("protocol", "module"), [("http", http_client), ("grpc", grpc_client)])
def test_infer(tmp_path: Path, protocol: str, module: ModuleType) -> None:
    import tritonclient.utils.cuda_shared_memory as cuda_shm
    from server_process import ServerProcess
    from test_doc_examples import IDENTITY, IDENTITY_CONFIG

    (tmp_path / "identity" / "1").mkdir(parents=True)
    (tmp_path / "identity" / "1" / "model.py").write_text(IDENTITY)
    (tmp_path / "identity" / "config.pbtxt").write_text(IDENTITY_CONFIG)
    values = np.arange(16, dtype=np.float32).reshape(1, 16)
    source = cuda_shm.create_shared_memory_region("source", 64, 0)
    target = cuda_shm.create_shared_memory_region("target", 64, 0)
    cuda_shm.set_shared_memory_region(source, [values])
    try:
        with (
            ServerProcess(f"--model-repository={tmp_path}", "--allow-client-shm=true") as server,
            module.InferenceServerClient(server.address(protocol)) as client,
        ):
            for name, region in (("source", source), ("target", target)):
                client.register_cuda_shared_memory(name, cuda_shm.get_raw_handle(region), 0, 64)
            x: Any = module.InferInput("INPUT", [1, 16], "FP32")
            y: Any = module.InferRequestedOutput("OUTPUT")
            x.set_shared_memory("source", 64)
            y.set_shared_memory("target", 64)
            client.infer("identity", [x], outputs=[y])
            np.testing.assert_array_equal(cuda_shm.get_contents_as_numpy(target, np.float32, [1, 16]), values)
            client.unregister_cuda_shared_memory()
    finally:
        cuda_shm.destroy_shared_memory_region(source)
        cuda_shm.destroy_shared_memory_region(target)
