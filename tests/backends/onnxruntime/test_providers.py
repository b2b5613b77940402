"""Selection of execution providers. GPU providers are not run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx_models
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

onnxruntime = pytest.importorskip("onnxruntime")

from neso.backends.onnxruntime.session import CPU, CUDA, find_providers  # noqa: E402
from neso.backends.tensor import Instance, InstanceKind  # noqa: E402
from neso.server.errors import ServerError  # noqa: E402

TENSORRT, OPENVINO = "TensorrtExecutionProvider", "OpenVINOExecutionProvider"
ON_GPU, ON_CPU = Instance("m_0", InstanceKind.GPU, 2), Instance("m_0", InstanceKind.CPU)


@pytest.fixture(autouse=True)
def all_providers(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, OPENVINO, CPU])


def find(text: str, instance: Instance):
    return find_providers(text_format.Parse('name: "m" ' + text, ModelConfig()), instance)


def accelerator(kind: str, name: str, **parameters: str) -> str:
    pairs = " ".join(f"parameters {{ key: '{key}' value: '{value}' }}" for key, value in parameters.items())
    return f"optimization {{ execution_accelerators {{ {kind}_execution_accelerator {{ name: '{name}' {pairs} }} }} }}"


def test_cpu_instance_uses_the_cpu_provider_only():
    assert find("", ON_CPU) == [CPU]
    assert find(accelerator("gpu", "tensorrt"), ON_CPU) == [CPU]


def test_openvino_accelerator():
    assert find(accelerator("cpu", "openvino", device_type="CPU"), ON_CPU) == [
        (OPENVINO, {"device_type": "CPU"}),
        CPU,
    ]


def test_gpu_instance_uses_cuda():
    assert find("", ON_GPU) == [(CUDA, {"device_id": "2"}), CPU]
    assert find(accelerator("gpu", "cuda", use_ep_level_unified_stream="1"), ON_GPU) == [
        (CUDA, {"use_ep_level_unified_stream": "1", "device_id": "2"}),
        CPU,
    ]


def test_cuda_options_in_model_parameters():
    text = (
        "parameters { key: 'gpu_mem_limit' value { string_value: '1024' } }"
        "parameters { key: 'cudnn_conv_algo_search' value { string_value: '1' } }"
        "parameters { key: 'arena_extend_strategy' value { string_value: '1' } }"
    )
    ((name, options), _) = find(text, ON_GPU)
    assert name == CUDA and options == {
        "gpu_mem_limit": "1024",
        "cudnn_conv_algo_search": "HEURISTIC",
        "arena_extend_strategy": "kSameAsRequested",
        "device_id": "2",
    }


def test_tensorrt_comes_before_cuda():
    text = accelerator(
        "gpu", "tensorrt", precision_mode="FP16", max_workspace_size_bytes="5", trt_engine_cache_enable="1"
    )
    assert find(text, ON_GPU) == [
        (
            TENSORRT,
            {
                "trt_max_workspace_size": "5",
                "trt_engine_cache_enable": "1",
                "trt_fp16_enable": "1",
                "device_id": "2",
            },
        ),
        (CUDA, {"device_id": "2"}),
        CPU,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (accelerator("gpu", "openvino"), "unknown GPU execution accelerator 'openvino' is requested for 'm'"),
        (accelerator("gpu", "tensorrt", precision_mode="FP4"), "precision_mode of model 'm' is 'FP4'"),
    ],
)
def test_unavailable_providers_are_rejected(text, message):
    with pytest.raises(ServerError, match=message):
        find(text, ON_GPU)


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
