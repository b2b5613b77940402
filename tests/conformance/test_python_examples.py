"""Models of Triton's Python backend examples, served unchanged in threads and in processes."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from eventually import wait_until
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException

REPOSITORY = Path(__file__).parent / "repositories" / "python_examples"
MODELS = sorted(folder.name for folder in REPOSITORY.iterdir())


@pytest.fixture(scope="module", params=["thread", "process"])
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def server(mode: str) -> Iterator[ServerProcess]:
    setting = f"--backend-config=python,execution-mode={mode}"
    with ServerProcess("--model-repository", REPOSITORY, setting, timeout=90) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[http_client.InferenceServerClient]:
    with http_client.InferenceServerClient(server.address("http"), concurrency=8) as client:
        yield client


def tensor(name: str, array: np.ndarray, datatype: str, module=http_client):
    given = module.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


A, B = np.array([1, 2, 3, 4], np.float32), np.array([4, 3, 2, 0.5], np.float32)


def pair(*shape: int) -> list[http_client.InferInput]:
    shape = shape or (4,)
    return [tensor("INPUT0", A.reshape(shape), "FP32"), tensor("INPUT1", B.reshape(shape), "FP32")]


def test_all_are_ready(client, server, mode):
    for model in MODELS:
        assert client.is_model_ready(model), model
    assert client.is_server_ready()
    children = psutil.Process(server.process.pid).children()
    # One of the models is an ensemble, another has four instances.
    assert len(children) == (len(MODELS) + 1 if mode == "process" else 0)


@pytest.mark.parametrize(
    ("model", "shape"), [("add_sub", (4,)), ("nobatch_auto_complete", (4,)), ("batch_auto_complete", (1, 4))]
)
def test_add_sub(client, model, shape):
    result = client.infer(model, pair(*shape))
    assert np.array_equal(result.as_numpy("OUTPUT0"), (A + B).reshape(shape))
    assert np.array_equal(result.as_numpy("OUTPUT1"), (A - B).reshape(shape))


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "expected"),
    [
        ("simple_string", ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1"), (lambda a, b: (a + b, a - b))),
        ("simple_ensemble", ("A", "B"), ("TWICE_A", "TWICE_B"), (lambda a, b: (2 * a, 2 * b))),
    ],
)
def test_string_model_and_its_ensemble(client, model, inputs, outputs, expected, binary):
    a, b = np.arange(32).reshape(2, 16), np.full((2, 16), -7)
    given = []
    for name, array in zip(inputs, (a, b), strict=True):
        made = http_client.InferInput(name, [2, 16], "BYTES")
        made.set_data_from_numpy(array.astype(np.bytes_).astype(np.object_), binary_data=binary)
        given.append(made)
    requested = [http_client.InferRequestedOutput(name, binary_data=binary) for name in outputs]
    result = client.infer(model, given, outputs=requested)
    for name, array in zip(outputs, expected(a, b), strict=True):
        assert np.array_equal(result.as_numpy(name).astype(np.int64), array)


def test_auto_completed_configurations(client):
    batched = client.get_model_config("batch_auto_complete")
    assert batched["max_batch_size"] == 4 and "dynamic_batching" in batched and batched["backend"] == "python"
    plain = client.get_model_config("nobatch_auto_complete")
    assert plain["max_batch_size"] == 0 and [t["name"] for t in plain["output"]] == ["OUTPUT0", "OUTPUT1"]


@pytest.mark.parametrize("model", ["bls_sync", "bls_async"])
def test_bls(client, model):
    name = tensor("MODEL_NAME", np.array(["add_sub"], np.object_), "BYTES")
    result = client.infer(model, [name, *pair()])
    assert np.array_equal(result.as_numpy("OUTPUT0"), A + B)
    assert np.array_equal(result.as_numpy("OUTPUT1"), A - B)
    name = tensor("MODEL_NAME", np.array(["nobody"], np.object_), "BYTES")
    with pytest.raises(InferenceServerException, match=r"not ready|'nobody' is not found"):
        client.infer(model, [name, *pair()])


@pytest.mark.parametrize("model", ["bls_decoupled_sync", "bls_decoupled_async"])
def test_bls_of_a_decoupled_model(client, model):
    for value in (0, 3, 8):
        result = client.infer(model, [tensor("IN", np.array([value], np.int32), "INT32")])
        assert result.as_numpy("SUM").tolist() == [value * value]


def test_custom_metrics_are_exported(client, server):
    for by, total in ((2.0, 2.0), (30.0, 32.0)):
        result = client.infer("custom_metrics", [tensor("BY", np.array([by]), "FP64")])
        assert result.as_numpy("TOTAL").tolist() == [total]
    metrics = server.metrics()
    assert metrics['example_units_total{model="custom_metrics",version="1"}'] == 32
    assert metrics['example_unit_sizes_bucket{le="10"}'] == 1 and metrics["example_unit_sizes_count"] == 2
    wait_until(lambda: "counted 30.0" in server.output)


def stream(server: ServerProcess, model: str, requests: list[list]) -> dict[str, list]:
    """Return the results of a stream by request id, until each has its final response."""
    results: queue.Queue = queue.Queue()
    answers: dict[str, list] = {str(i): [] for i in range(len(requests))}
    with grpc_client.InferenceServerClient(server.address("grpc")) as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        for i, inputs in enumerate(requests):
            client.async_stream_infer(model, inputs, request_id=str(i), enable_empty_final_response=True)
        ended = 0
        while ended < len(requests):
            result, error = results.get(timeout=60)
            assert error is None, error
            response = result.get_response()
            ended += response.parameters["triton_final_response"].bool_param
            if response.outputs:
                answers[response.id].append(result)
    return answers


def test_repeat(server):
    def request(values: list[int], delay: int) -> list:
        return [
            tensor("IN", np.array([values], np.int32), "INT32", grpc_client),
            tensor("DELAY", np.full((1, len(values)), delay, np.uint32), "UINT32", grpc_client),
            tensor("WAIT", np.zeros((1, 1), np.uint32), "UINT32", grpc_client),
        ]

    answers = stream(server, "repeat_int32", [request([4, 2, 0, 1], 5), request([7], 0), request([], 0)])
    assert [r.as_numpy("OUT").item() for r in answers["0"]] == [4, 2, 0, 1]
    assert [r.as_numpy("IDX").item() for r in answers["0"]] == [0, 1, 2, 3]
    assert [r.as_numpy("OUT").item() for r in answers["1"]] == [7] and answers["2"] == []


def test_square(server):
    values = (4, 0, 2, 1)
    requests = [[tensor("IN", np.array([v], np.int32), "INT32", grpc_client)] for v in values]
    answers = stream(server, "square_int32", requests)
    for i, value in enumerate(values):
        assert [r.as_numpy("OUT").item() for r in answers[str(i)]] == [value] * value


def test_instance_groups(client):
    places: set[str] = set()
    for _ in range(10):  # slow requests may all go to the same instance
        calls = [client.async_infer("instance_kind", []) for _ in range(6)]
        places |= {call.get_result().as_numpy("PLACE")[0].decode() for call in calls}
        if len(places) == 3:
            break
    assert places == {
        "instance_kind_0_0 CPU cpu", "instance_kind_0_1 CPU cpu", "model_kind_0 MODEL cpu",
    }  # fmt: skip


@pytest.mark.parametrize("side", [2, 700])  # in a message, and in shared memory
def test_preprocessing(client, side):
    rng = np.random.default_rng(side)
    calls = []
    for rows in (1, 3, 2):
        image = rng.integers(0, 255, (rows, side, side, 3), np.uint8)
        labels = np.array([[f"ümlaut {i}"] for i in range(rows)], np.object_)
        inputs = [tensor("IMAGE", image, "UINT8"), tensor("LABEL", labels, "BYTES")]
        calls.append((image, client.async_infer("preprocess", inputs)))
    for image, call in calls:
        result = call.get_result()
        mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
        expected = ((image / 255 - mean) / deviation).transpose(0, 3, 1, 2)
        assert np.allclose(result.as_numpy("PIXELS"), expected, atol=1e-5)
        labels = [text.decode() for text in result.as_numpy("LABEL").flat]
        assert labels == [f"ÜMLAUT {i}" for i in range(len(image))]
