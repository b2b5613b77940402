"""Options that change the limits of a server on requests, and a request beyond each."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson
import pytest
import tritonclient.grpc as grpc_client
from eventually import wait_until
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "abuse"))

from raw_http2 import RawHttp2, body, request

FLAGS = (
    "--max-request-tensors=3",
    "--max-tensor-strings=4",
    "--http-max-header-size=2000",
    "--http-header-timeout-secs=0.2",
    "--http-body-timeout-secs=0.2",
    "--http-idle-timeout-secs=0.2",
    "--grpc-max-header-size=2000",
    "--grpc-message-timeout=200",
    "--openai-max-json-values=1000",
)
STRINGS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""
INFER = "/v2/models/strings/infer"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    (repository / "strings" / "1").mkdir(parents=True)
    (repository / "strings" / "config.pbtxt").write_text(CONFIG)
    (repository / "strings" / "1" / "model.py").write_text(STRINGS)
    with ServerProcess(f"--model-repository={repository}", *FLAGS) as server:
        assert server.ports, server.output
        yield server


def strings(count: int) -> dict[str, Any]:
    return {"name": "IN", "datatype": "BYTES", "shape": [count], "data": ["a"] * count}


def as_tensor(count: int) -> grpc_client.InferInput:
    tensor = grpc_client.InferInput("IN", [count], "BYTES")
    tensor.set_data_from_numpy(np.array([b"a"] * count, np.object_))
    return tensor


def test_tensors_and_parameters(served):
    assert served.post(INFER, {"inputs": [strings(1)]})[0] == 200
    for inputs in ([strings(1)] * 4, [{**strings(1), "parameters": {}}] * 4):  # read natively, and in Python
        status, answer = served.post(INFER, {"inputs": inputs})
        assert (status, answer["error"]) == (400, "'inputs' has 4 members, at most 3 are supported")
    with (
        grpc_client.InferenceServerClient(served.address("grpc")) as client,
        pytest.raises(InferenceServerException, match="the limits are 3 tensors and parameters"),
    ):
        client.infer("strings", [as_tensor(3)], parameters=dict.fromkeys("abcd", "x" * 30000))


@pytest.mark.parametrize("count", [4, 5])
def test_elements_of_binary_strings(served, count):
    data = serialize_byte_tensor(np.array([b"a"] * count, np.object_)).item()
    tensor = {
        "name": "IN",
        "datatype": "BYTES",
        "shape": [count],
        "parameters": {"binary_data_size": len(data)},
    }
    head = orjson.dumps({"inputs": [tensor]})
    length = {"Inference-Header-Content-Length": str(len(head))}
    status, answer = served.post(INFER, head + data, **length)
    with grpc_client.InferenceServerClient(served.address("grpc")) as client:
        if count == 4:
            assert status == 200
            assert client.infer("strings", [as_tensor(count)]).as_numpy("OUT").tolist() == [b"a"] * count
            return
        message = "expected at most 4 string elements for inference input 'IN' for model 'strings', got 5"
        assert (status, answer["error"]) == (400, message)
        with pytest.raises(InferenceServerException, match=message):
            client.infer("strings", [as_tensor(count)])


@pytest.mark.parametrize("protocol", ["http", "openai"])
@pytest.mark.parametrize(
    ("request_bytes", "response"),
    [
        (b"GET /health HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 3000 + b"\r\n\r\n", b"HTTP/1.1 431 "),
        (b"GET /health HTTP/1.1\r\nHost: h\r\n", b"HTTP/1.1 408 "),
        (b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nx", b"HTTP/1.1 408 "),
        (b"", b""),
    ],
    ids=["large head", "unfinished head", "unfinished body", "idle"],
)
def test_http_requests_and_connections(served, protocol, request_bytes, response):
    with socket.create_connection(("127.0.0.1", served.ports[protocol]), timeout=60) as connection:
        connection.sendall(request_bytes)
        received = b""
        while data := connection.recv(4096):  # the server closes the connection
            received += data
    assert received.startswith(response) and bool(received) == bool(response)


def test_metadata_of_a_grpc_call(served):
    with grpc.insecure_channel(served.address("grpc")) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(
            b"", metadata=[("x", "x" * 3000)], timeout=60
        )


def test_unfinished_grpc_message(served):
    with RawHttp2(served.ports["grpc"]) as client:
        client.send(request(1) + body(1, b"\0" + struct.pack(">I", 9) + b"x", end=False))
        wait_until(lambda: any(b"took too long" in payload for _, _, _, payload in client.frames))


def test_values_of_an_openai_body(served):
    for fields, kind in (
        ({"prompt": [1] * 1001}, "1000 values"),
        ({"prompt": ["a"] * 51}, "50 strings"),
        ({"prompt": [[]] * 51}, "50 objects and arrays"),
    ):
        status, answer = served.post("/v1/completions", {"model": "strings", **fields}, "openai")
        assert (status, answer["error"]["message"]) == (400, f"The body has more than {kind}.")
