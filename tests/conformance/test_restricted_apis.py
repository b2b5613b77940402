"""Restricted groups: rejected without the header, served with it; other groups are unchanged."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import parameters_model
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from eventually import wait_until
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException

GRPC_INFER = {"triton-grpc-protocol-infer-key": "secret"}
SETTINGS = (
    "model-config,model-repository,shared-memory,trace,logging:Admin-Key=a b=c",
    "inference:infer-key=secret",
    "statistics:stats-key=s",
)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    parameters_model.write(repository)
    with ServerProcess(
        "neso-pilot",
        f"--model-repository={repository}",
        "--allow-client-shm=true",
        *(f"--http-restricted-api={setting}" for setting in SETTINGS),
        *(f"--grpc-restricted-protocol={setting}" for setting in SETTINGS),
    ) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture
def http(process: ServerProcess) -> Iterator[http_client.InferenceServerClient]:
    with http_client.InferenceServerClient(process.address("http")) as client:
        yield client


@pytest.fixture
def rpc(process: ServerProcess) -> Iterator[grpc_client.InferenceServerClient]:
    with grpc_client.InferenceServerClient(process.address("grpc")) as client:
        yield client


def inputs(module: Any) -> list[Any]:
    tensor = module.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"x"], np.object_))
    return [tensor]


CALLS = [
    ("get_model_config", ["parameters"], "admin"),
    ("get_model_repository_index", [], "admin"),
    ("get_system_shared_memory_status", [], "admin"),
    ("get_cuda_shared_memory_status", [], "admin"),
    ("get_inference_statistics", [], "stats"),
    ("infer", ["parameters"], "infer"),
]
HEADERS = {"admin": "a b=c", "infer": "secret", "stats": "s"}


@pytest.mark.parametrize(("method", "arguments", "key"), CALLS)
def test_http_needs_the_header(http, method, arguments, key):
    arguments = [*arguments, inputs(http_client)] if method == "infer" else arguments
    call = getattr(http, method)
    wrong = {f"{key}-key": HEADERS[key] + "x"}
    for headers in (None, wrong, {"stats-key" if key != "stats" else "admin-key": "s"}):
        with pytest.raises(InferenceServerException) as caught:
            call(*arguments, headers=headers)
        assert caught.value.status() == "403"
        assert caught.value.message() == f"This API is restricted, expecting header '{key}-key'"
    call(*arguments, headers={f"{key.upper()}-Key": HEADERS[key]})


@pytest.mark.parametrize(("method", "arguments", "key"), CALLS)
def test_grpc_needs_the_metadata(rpc, method, arguments, key):
    arguments = [*arguments, inputs(grpc_client)] if method == "infer" else arguments
    call = getattr(rpc, method)
    for headers in (None, {f"{key}-key": HEADERS[key]}, {f"triton-grpc-protocol-{key}-key": "wrong"}):
        with pytest.raises(InferenceServerException) as caught:
            call(*arguments, headers=headers)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        expected = f"This protocol is restricted, expecting header 'triton-grpc-protocol-{key}-key'"
        assert caught.value.message() == expected
    call(*arguments, headers={f"triton-grpc-protocol-{key}-key": HEADERS[key]})


def test_unrestricted_apis_need_no_header(http, rpc):
    for client in (http, rpc):
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("parameters")
        client.get_server_metadata()
        client.get_model_metadata("parameters")


@pytest.mark.parametrize("path", ["generate", "generate_stream", "infer", "versions/1/infer"])
def test_every_way_to_infer_over_http(process, path):
    status, body = process.post(f"/v2/models/parameters/{path}", {"IN": "x"})
    assert (status, body) == (403, {"error": "This API is restricted, expecting header 'infer-key'"})


def test_streams(rpc):
    answers: queue.Queue = queue.Queue()

    def stream_infer(headers: dict[str, str] | None) -> Any:
        rpc.start_stream(lambda result, error: answers.put(error or result), headers=headers)
        with suppress(InferenceServerException):  # a stream that was rejected immediately
            rpc.async_stream_infer("parameters", inputs(grpc_client))
        found = answers.get(timeout=60)
        rpc.stop_stream()
        return found

    refused = stream_infer(None)
    assert isinstance(refused, InferenceServerException)
    assert "expecting header 'triton-grpc-protocol-infer-key'" in str(refused)
    assert stream_infer(GRPC_INFER).as_numpy("OUT")[0] == b"{}"


@pytest.mark.parametrize("protocol", ["http", "openai"])
def test_openai_api_is_restricted_too(process, protocol):
    body = {"model": "neso-pilot", "prompt": "Hi", "max_tokens": 1}
    status, response = process.post("/v1/completions", body, protocol)
    assert status == 403 and "expecting header 'infer-key'" in response["error"]["message"]
    assert process.post("/v1/completions", body, protocol, **{"infer-key": "secret"})[0] == 200
    assert process.get("/v1/models", protocol)[0] == 403
    if protocol == "openai":
        assert process.get("/health/ready", protocol)[0] == 200


def test_the_standard_health_service_is_health(process):
    with grpc.insecure_channel(process.address("grpc")) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"\x08\x01"


def test_restricted_health():
    with ServerProcess(
        "--http-restricted-api=health:key=v",
        "--grpc-restricted-protocol=health:key=v",
        "--allow-openai=false",
    ) as server:
        assert server.get("/v2/health/live")[0] == 403
        with grpc_client.InferenceServerClient(server.address("grpc")) as client:
            with pytest.raises(InferenceServerException, match="restricted"):
                client.is_server_live()
            assert client.is_server_live(headers={"triton-grpc-protocol-key": "v"})
        with grpc.insecure_channel(server.address("grpc")) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.RpcError, match="restricted"):
                check(b"")
            assert check(b"", metadata=[("triton-grpc-protocol-key", "v")]) == b"\x08\x01"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--http-restricted-api=health", "--http-restricted-api: expected GROUP[,GROUP…]:KEY=VALUE"),
        (
            "--grpc-restricted-protocol=warp:a=b",
            "--grpc-restricted-protocol: unknown restricted group 'warp'",
        ),
        ("--http-restricted-api=health,health:a=b", "can not be specified more than once"),
    ],
)
def test_invalid_settings(setting, message):
    with ServerProcess(setting) as server:
        assert server.process.wait(60) == 2
        wait_until(lambda: message in server.output)
