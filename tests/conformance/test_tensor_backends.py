"""ONNX and PyTorch models on a real server, with Triton's clients."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from eventually import wait_until
from server_process import ServerProcess

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
pytest.importorskip("torch")
BACKENDS = Path(__file__).parents[1] / "backends"
sys.path[:0] = [str(BACKENDS / "onnxruntime"), str(BACKENDS / "pytorch")]

from onnx_models import T, accumulator, graph, linear, node  # noqa: E402
from torch_models import AddSub, Linear, Upper, export, script, torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

BATCHED_LINEAR = """
platform: "pytorch_libtorch"
max_batch_size: 16
dynamic_batching { max_queue_delay_microseconds: 200000 }
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 3 ] }
"""
ADD_SUB = """
backend: "pytorch"
input { name: "INPUT__0" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "INPUT__1" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT__1" data_type: TYPE_FP32 dims: [ -1 ] }
"""
UPPER = """
backend: "pytorch"
input { name: "INPUT__0" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "OUTPUT__0" data_type: TYPE_STRING dims: [ -1 ] }
"""
BATCHED_ONNX = """
backend: "onnxruntime"
max_batch_size: 16
dynamic_batching { max_queue_delay_microseconds: 200000 }
instance_group { count: 2 }
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""
SEQUENCES = """
platform: "onnxruntime_onnx"
max_batch_size: 4
sequence_batching {
  oldest { max_candidate_sequences: 4 }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  state { input_name: "STATE" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""
CLIENTS = {"http": http_client, "grpc": grpc_client}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")

    def add(name: str, file: str, data: bytes, config: str | None = None) -> None:
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / file).write_bytes(data)
        if config is not None:
            (repository / name / "config.pbtxt").write_text(config)

    text = [("IN", T.STRING, ["N", 2])], [("OUT", T.STRING, ["N", 2])]
    half = [("IN", T.FLOAT16, ["N", 2])], [("OUT", T.FLOAT16, ["N", 2])]
    add("onnx_plain", "model.onnx", linear())
    add("onnx_batched", "model.onnx", linear(), BATCHED_ONNX)
    add("onnx_text", "model.onnx", graph([node("Identity", ["IN"], ["OUT"])], *text))
    add("onnx_half", "model.onnx", graph([node("Add", ["IN", "IN"], ["OUT"])], *half))
    add("onnx_sequence", "model.onnx", accumulator(), SEQUENCES)
    add("onnx_broken", "model.onnx", b"nothing")
    add("torch_batched", "model.pt", script(Linear()), BATCHED_LINEAR)
    add("torch_add_sub", "model.pt", script(AddSub()), ADD_SUB)
    add("torch_exported", "model.pt2", export(AddSub(), (torch.ones(3), torch.ones(3))), ADD_SUB)
    add("torch_upper", "model.pt", script(Upper()), UPPER)
    with ServerProcess(
        f"--model-repository={repository}",
        "--exit-on-error=false",
        "--strict-readiness=false",
        "--backend-config=onnxruntime,default-max-batch-size=6",
        "--backend-config=onnxruntime,enable-global-threadpool=1",
        "--backend-config=onnxruntime,intra_op_thread_count=1",
    ) as server:
        assert "failed   onnx_plain" not in server.output, server.output
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(request, served):
    """The client module and a connected client."""
    module = CLIENTS[request.param]
    options = {"concurrency": 32} if request.param == "http" else {}
    with module.InferenceServerClient(served.address(request.param), **options) as connected:
        yield module, connected


def infer(client, model, outputs, **arrays):
    """Return outputs by name."""
    module, connected = client
    kinds = {"float32": "FP32", "float16": "FP16", "object": "BYTES"}
    inputs = []
    for name, array in arrays.items():
        tensor = module.InferInput(name, list(array.shape), kinds[array.dtype.name])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    result = connected.infer(model, inputs)
    return {name: result.as_numpy(name) for name in outputs}


def statistics(server, model: str) -> dict:
    _, body = server.get(f"/v2/models/{model}/stats")
    return json.loads(body)["model_stats"][0]


def test_metadata_and_config(client, served):
    _, connected = client
    metadata = connected.get_model_metadata("onnx_plain")
    if not isinstance(metadata, dict):
        inputs = [(t.name, t.datatype, list(t.shape)) for t in metadata.inputs]
        assert (metadata.platform, inputs) == ("onnxruntime_onnx", [("X", "FP32", [-1, 4])])
        config = connected.get_model_config("onnx_plain").config
        assert (config.max_batch_size, config.HasField("dynamic_batching")) == (6, True)
        return
    assert metadata == {
        "name": "onnx_plain",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [
            {"name": "SUM", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "TOP", "datatype": "INT64", "shape": [-1, 1]},
        ],
    }
    config = connected.get_model_config("onnx_plain")
    assert config["max_batch_size"] == 6 and "dynamic_batching" in config
    assert config["default_model_filename"] == "model.onnx"
    (broken,) = [e for e in connected.get_model_repository_index() if e["name"] == "onnx_broken"]
    assert broken["state"] == "UNAVAILABLE" and "failed to load 'model.onnx'" in broken["reason"]


def test_values_equal_the_runtime(client):
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    found = infer(client, "onnx_plain", ("SUM", "TOP"), X=x)
    expected_sum, expected_top = onnxruntime.InferenceSession(linear()).run(None, {"X": x})
    np.testing.assert_allclose(found["SUM"], expected_sum, rtol=1e-6)
    np.testing.assert_array_equal(found["TOP"], expected_top[:, None])


def test_text_and_half_precision(client):
    text = np.array([["a", "grüß"], ["", "c"]], np.object_)
    assert infer(client, "onnx_text", ["OUT"], IN=text)["OUT"].tolist() == [
        [s.encode() for s in row] for row in text
    ]
    half = np.array([[1, 2.5]], np.float16)
    assert infer(client, "onnx_half", ["OUT"], IN=half)["OUT"].tolist() == [[2, 5]]
    words = np.array(["ab", "c"], np.object_)
    assert infer(client, "torch_upper", ["OUTPUT__0"], INPUT__0=words)["OUTPUT__0"].tolist() == [b"AB", b"C"]


@pytest.mark.parametrize("model", ["torch_add_sub", "torch_exported"])
def test_torch_values(client, model):
    a, b = np.array([5, 7, 9], np.float32), np.array([1, 2, 4], np.float32)
    found = infer(client, model, ("OUTPUT__0", "OUTPUT__1"), INPUT__0=a, INPUT__1=b)
    assert found["OUTPUT__0"].tolist() == (a + b).tolist() and found["OUTPUT__1"].tolist() == (a - b).tolist()


@pytest.mark.parametrize(
    ("model", "name", "output"), [("onnx_batched", "X", "SUM"), ("torch_batched", "x", "OUTPUT__0")]
)
def test_requests_are_batched(client, served, model, name, output):
    x = np.random.default_rng(1).standard_normal((32, 4)).astype(np.float32)
    before = statistics(served, model)
    start = threading.Barrier(16)

    def send_request(n: int) -> np.ndarray:
        # The http client belongs to the thread that made it.
        module = client[0]
        with module.InferenceServerClient(served.address("http" if module is http_client else "grpc")) as own:
            start.wait()
            return infer((module, own), model, [output], **{name: x[2 * n : 2 * n + 2]})[output]

    with ThreadPoolExecutor(16) as pool:
        found = np.concatenate(list(pool.map(send_request, range(16))))
    if model == "torch_batched":
        expected = Linear()(torch.from_numpy(x)).detach().numpy()
    else:
        expected = onnxruntime.InferenceSession(linear()).run(["SUM"], {"X": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    wait_until(lambda: statistics(served, model)["inference_count"] == before["inference_count"] + 32)
    after = statistics(served, model)
    assert after["execution_count"] - before["execution_count"] <= 8
    assert max(batch["batch_size"] for batch in after["batch_stats"]) > 2
    batch = after["batch_stats"][-1]
    assert all(batch[stage]["ns"] > 0 for stage in ("compute_input", "compute_infer", "compute_output"))


def test_sequences(served):
    """Many concurrent sequences, each with its running sum."""

    def sequence(number: int) -> list[float]:
        sums = []
        with grpc_client.InferenceServerClient(served.address("grpc")) as own:
            for step in range(5):
                tensor = grpc_client.InferInput("IN", [1, 1], "FP32")
                tensor.set_data_from_numpy(np.array([[number]], np.float32))
                result = own.infer(
                    "onnx_sequence",
                    [tensor],
                    sequence_id=number,
                    sequence_start=step == 0,
                    sequence_end=step == 4,
                )
                sums.append(float(result.as_numpy("OUT")[0, 0]))
        return sums

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(sequence, range(1, 9)))
    assert found == [[float(n * step) for step in range(1, 6)] for n in range(1, 9)]


def test_errors(served):
    body = {"inputs": [{"name": "X", "shape": [1, 5], "datatype": "FP32", "data": [0] * 5}]}
    status, response = served.post("/v2/models/onnx_plain/infer", body)
    assert status == 400 and "unexpected shape for input 'X' for model 'onnx_plain'" in response["error"]
    tensors = [
        {"name": f"INPUT__{n}", "shape": [n + 2], "datatype": "FP32", "data": [0] * (n + 2)} for n in range(2)
    ]
    status, response = served.post("/v2/models/torch_add_sub/infer", {"inputs": tensors})
    assert status == 500 and response["error"].startswith(
        "PyTorch execute failure: RuntimeError: The size of tensor"
    )
