"""Headers that are forwarded to a model as parameters, over HTTP and gRPC."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import parameters_model
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from server_process import ServerProcess

HEADERS = {"X-Team": "left", "x-user-name": "eve", "other": "o"}
FORWARDED = {"x-team": "left", "x-user-name": "eve"}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    parameters_model.write(repository)
    patterns = (
        "--http-header-forward-pattern=^X-(team|user)",
        "--grpc-header-forward-pattern=^x-(team|user)",
    )
    with ServerProcess(f"--model-repository={repository}", *patterns) as process:
        assert process.ports, process.output
        yield process


def tensor(module: Any) -> Any:
    tensor = module.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"x"], np.object_))
    return tensor


def seen(result: Any) -> dict[str, Any]:
    return json.loads(result.as_numpy("OUT")[0])


@pytest.mark.parametrize(("protocol", "module"), [("http", http_client), ("grpc", grpc_client)])
def test_infer(process, protocol, module):
    headers = {name.lower() if protocol == "grpc" else name: value for name, value in HEADERS.items()}
    with module.InferenceServerClient(process.address(protocol)) as client:
        result = client.infer("parameters", [tensor(module)], headers=headers, parameters={"own": 3})
        assert seen(result) == {**FORWARDED, "own": 3}
        assert seen(client.infer("parameters", [tensor(module)], parameters={"own": 3})) == {"own": 3}


@pytest.mark.parametrize(("protocol", "module"), [("http", http_client), ("grpc", grpc_client)])
def test_header_overrides_parameter(process, protocol, module):
    """A proxy that sets the header must be able to rely on it."""
    with module.InferenceServerClient(process.address(protocol)) as client:
        result = client.infer(
            "parameters", [tensor(module)], headers={"x-team": "right"}, parameters={"x-team": "forged"}
        )
        assert seen(result) == {"x-team": "right"}


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
def test_generate(process, endpoint):
    import urllib.request

    url = process.url(f"/v2/models/parameters/{endpoint}")
    request = urllib.request.Request(url, b'{"IN": "x", "parameters": {"own": 1}}', HEADERS)
    with urllib.request.urlopen(request, timeout=60) as response:
        body = response.read().removeprefix(b"data: ")
    assert json.loads(json.loads(body)["OUT"]) == {**FORWARDED, "own": 1}


def test_stream(process):
    answers: queue.Queue = queue.Queue()
    with grpc_client.InferenceServerClient(process.address("grpc")) as client:
        client.start_stream(lambda result, error: answers.put(error or result), headers={"x-team": "left"})
        for number in range(3):
            client.async_stream_infer(
                "parameters", [tensor(grpc_client)], request_id=str(number), parameters={"n": number}
            )
        results = [answers.get(timeout=60) for _ in range(3)]
        client.stop_stream()
    assert {result.get_response().id: seen(result) for result in results} == {
        str(number): {"x-team": "left", "n": number} for number in range(3)
    }


def test_invalid_pattern():
    with ServerProcess("--http-header-forward-pattern=(") as server:
        assert server.process.wait(60) == 2
        assert "--http-header-forward-pattern: '(' is not a regular expression: missing" in server.output
