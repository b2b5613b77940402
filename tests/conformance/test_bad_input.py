"""Invalid input gets an immediate error of the protocol, and the server continues."""

from __future__ import annotations

import socket

import numpy as np
import pytest
import tritonclient.grpc as client
from tritonclient.utils import InferenceServerException

MODEL = "neso-pilot"
GENERATE = f"/v2/models/{MODEL}/generate"
GOOD = {"text_input": "Hi", "max_tokens": 2}


@pytest.fixture(autouse=True)
def server_survives(server):
    yield
    assert server.post(GENERATE, GOOD)[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2/models/nothing/generate", GOOD, 404, "unknown model: 'nothing'"),
        (f"/v2/models/{MODEL}/versions/7/generate", GOOD, 404, "version 7 is not found"),
        (GENERATE, b'{"text_input": ', 400, "JSON"),
        (GENERATE, b"[1, 2]", 400, ""),
        (GENERATE, {"text_input": 5}, 400, "text_input"),
        (GENERATE, {"text_input": ["a", "b"]}, 400, "text_input"),
        (GENERATE, {}, 400, "text_input"),
        (GENERATE, {"text_input": "Hi", "stream": "yes"}, 400, "stream"),
        (GENERATE, {"text_input": "Hi", "max_tokens": -1}, 400, "max_tokens"),
        (GENERATE, {"text_input": "Hi", "temperature": -0.5}, 400, "temperature"),
        (GENERATE, {"text_input": "Hi", "temperature": 1e9}, 400, "temperature"),
        (GENERATE, {"text_input": "Hi", "tempreature": 1}, 400, "tempreature"),
        (GENERATE, {"text_input": "Hi", "sampling_parameters": "{"}, 400, "sampling_parameters"),
        (GENERATE, {"text_input": "Hi", "parameters": {"top_p": 2}}, 400, "top_p"),
        (GENERATE, {"text_input": "word " * 5000}, 400, "context is 2048 tokens"),
        (GENERATE, {"text_input": "word " * 1_000_000}, 400, "context is 2048 tokens"),
    ],
)
def test_http(server, path, body, status, message):
    got, response = server.post(path, body)
    assert (got, list(response)) == (status, ["error"])
    assert message in response["error"]


def test_body_too_large(server):
    with socket.create_connection(("127.0.0.1", server.ports["http"]), timeout=60) as connection:
        connection.sendall(
            f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 33}\r\n\r\n".encode()
        )
        assert b" 400 " in connection.recv(4096)


@pytest.mark.parametrize(
    ("prompt", "parameters", "message"),
    [
        ("Hi", {"max_tokens": -1}, "max_tokens"),
        ("Hi", {"temperature": -1.0}, "temperature"),
        ("word " * 5000, {}, "context is 2048 tokens"),
    ],
)
def test_grpc_stream(server, prompt, parameters, message):
    import queue

    results: queue.Queue = queue.Queue()
    with client.InferenceServerClient(server.address("grpc")) as triton:
        tensor = client.InferInput("text_input", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([prompt.encode()], np.object_))
        triton.start_stream(lambda result, error: results.put(error or result))
        triton.async_stream_infer(MODEL, [tensor], parameters=parameters)
        error = results.get(timeout=60)
        triton.stop_stream()
    assert isinstance(error, InferenceServerException)
    assert message in error.message()


def test_grpc_unknown_model(server):
    with (
        client.InferenceServerClient(server.address("grpc")) as triton,
        pytest.raises(InferenceServerException, match="unknown model") as caught,
    ):
        triton.get_model_metadata("nothing")
    assert caught.value.status() == "StatusCode.NOT_FOUND"
