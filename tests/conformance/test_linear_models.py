"""Models of OpenVINO and TensorFlow on a real server, with Triton's clients. All compute OUT = X @ WEIGHTS."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException

BACKENDS = Path(__file__).parents[1] / "backends"
sys.path[:0] = [str(BACKENDS / "openvino"), str(BACKENDS / "tensorflow")]

INSTANCES = """
max_batch_size: 16
dynamic_batching { }
instance_group { count: 2 kind: KIND_CPU }
"""
OPENVINO = f"""
backend: "openvino"
{INSTANCES}
parameters {{ key: "PERFORMANCE_HINT" value {{ string_value: "THROUGHPUT" }} }}
"""
GRAPHDEF = f"""
platform: "tensorflow_graphdef"
{INSTANCES}
input {{ name: "X" data_type: TYPE_FP32 dims: [ 4 ] }}
output {{ name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] }}
"""

Files = dict[str, bytes]


def openvino_models() -> tuple[Files, tuple[str, Files], np.ndarray]:
    """Return the files of a model without config.pbtxt, config.pbtxt and files of a batched one, and the weights.

    Like `tensorflow_models`, skips the test if the framework is not installed.
    """
    from openvino_models import WEIGHTS, linear

    return linear(), (OPENVINO, linear()), WEIGHTS


def tensorflow_models() -> tuple[Files, tuple[str, Files], np.ndarray]:
    """Return a SavedModel without config.pbtxt, config.pbtxt and files of a GraphDef, and the weights."""
    from tensorflow_models import WEIGHTS, graph_def, linear

    return linear(), (GRAPHDEF, graph_def()), WEIGHTS


class Served:
    """A server with the models "alone" and "batched" of a backend."""

    def __init__(self, server: ServerProcess, weights: np.ndarray) -> None:
        self.server, self.weights = server, weights


# TensorFlow: see tests/backends/tensorflow/test_tensorflow_backend.py.
TENSORFLOW = pytest.param("tensorflow", marks=[pytest.mark.slow, pytest.mark.alone])


@pytest.fixture(scope="module", params=["openvino", TENSORFLOW])
def served(request, tmp_path_factory):
    models = {"openvino": openvino_models, "tensorflow": tensorflow_models}[request.param]
    alone, (config, batched), weights = models()
    repository = tmp_path_factory.mktemp("repository")
    for name, files in (("alone", alone), ("batched", batched)):
        for file, data in files.items():
            path = repository / name / "1" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (repository / "batched" / "config.pbtxt").write_text(config)
    with ServerProcess(f"--model-repository={repository}") as server:
        assert server.ports, server.output
        yield Served(server, weights)


@pytest.fixture(params=[http_client, grpc_client], ids=["http", "grpc"])
def client(request, served):
    """The client module and a connected client."""
    protocol = "http" if request.param is http_client else "grpc"
    options = {"concurrency": 8} if protocol == "http" else {}
    with request.param.InferenceServerClient(served.server.address(protocol), **options) as connected:
        yield request.param, connected


def tensor(module, array: np.ndarray):
    given = module.InferInput("X", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    return given


@pytest.mark.parametrize("model", ["alone", "batched"])
def test_values(client, served, model):
    module, connected = client
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = connected.infer(model, [tensor(module, x)]).as_numpy("OUT")
    np.testing.assert_array_equal(found, x @ served.weights)


def test_concurrent_requests(served):
    with http_client.InferenceServerClient(served.server.address("http"), concurrency=8) as connected:
        arrays = [np.full((1 + n % 3, 4), n, np.float32) for n in range(24)]
        pending = [connected.async_infer("batched", [tensor(http_client, x)]) for x in arrays]
        for x, request in zip(arrays, pending, strict=True):
            np.testing.assert_array_equal(request.get_result().as_numpy("OUT"), x @ served.weights)


def test_wrong_shape_is_an_error(client):
    module, connected = client
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'X'"):
        connected.infer("alone", [tensor(module, np.ones((1, 5), np.float32))])
