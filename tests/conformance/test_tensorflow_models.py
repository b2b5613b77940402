"""TensorFlow models on a real server, with Triton's clients."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException

sys.path.insert(0, str(Path(__file__).parents[1] / "backends" / "tensorflow"))

from tensorflow_models import WEIGHTS, graph_def, linear

GRAPH = """
platform: "tensorflow_graphdef"
max_batch_size: 16
dynamic_batching { }
instance_group { count: 2 kind: KIND_CPU }
input { name: "X" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 3 ] }
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    for name, config, files in (("saved", None, linear()), ("graph", GRAPH, graph_def())):
        for file, data in files.items():
            path = repository / name / "1" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if config is not None:
            (repository / name / "config.pbtxt").write_text(config)
    with ServerProcess(f"--model-repository={repository}") as server:
        assert server.ports, server.output
        yield server


@pytest.fixture(params=[http_client, grpc_client], ids=["http", "grpc"])
def client(request, served):
    """The client module and a connected client."""
    protocol = "http" if request.param is http_client else "grpc"
    options = {"concurrency": 8} if protocol == "http" else {}
    with request.param.InferenceServerClient(served.address(protocol), **options) as connected:
        yield request.param, connected


def tensor(module, array: np.ndarray):
    given = module.InferInput("X", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    return given


@pytest.mark.parametrize("model", ["saved", "graph"])
def test_values(client, model):
    module, connected = client
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = connected.infer(model, [tensor(module, x)]).as_numpy("OUT")
    np.testing.assert_array_equal(found, x @ WEIGHTS)


def test_concurrent_requests(served):
    with http_client.InferenceServerClient(served.address("http"), concurrency=8) as connected:
        arrays = [np.full((1 + n % 3, 4), n, np.float32) for n in range(24)]
        pending = [connected.async_infer("graph", [tensor(http_client, x)]) for x in arrays]
        for x, request in zip(arrays, pending, strict=True):
            np.testing.assert_array_equal(request.get_result().as_numpy("OUT"), x @ WEIGHTS)


def test_wrong_shape_is_an_error(client):
    module, connected = client
    with pytest.raises(InferenceServerException, match="unexpected shape for input 'X'"):
        connected.infer("saved", [tensor(module, np.ones((1, 5), np.float32))])
