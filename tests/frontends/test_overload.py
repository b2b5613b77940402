"""Requests beyond the limits of requests in flight, over every protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
import tritonclient.grpc as grpc_client
from eventually import wait_until
from repository_builder import SLOW, RepositoryBuilder

import neso
import neso.frontends.openai
from neso.server.admission import AdmissionLimits

INFER = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[neso.Server]:
    RepositoryBuilder(tmp_path).add("slow", SLOW)  # the first request ends when the file `go` exists
    limits = AdmissionLimits(request_sequences=1, client_sequences=1, sequences=1)
    with neso.Server(model_repository=tmp_path, exit_timeout=60, admission=limits) as server:
        yield server


@pytest.fixture
def busy(server: neso.Server, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The URL and the gRPC port of a server with one request in flight, which is all that it accepts."""
    http = neso.KServeHttp(server, neso.KServeHttp.Options(host="127.0.0.1", port=0))
    grpc = neso.KServeGrpc(server, neso.KServeGrpc.Options(host="127.0.0.1", port=0))
    with http, grpc:
        url = f"http://127.0.0.1:{http.port}/v2/models/slow"
        first: list[int] = []
        thread = threading.Thread(
            target=lambda: first.append(httpx.post(f"{url}/infer", json=INFER, timeout=60).status_code)
        )
        thread.start()
        model = server.running_core().model("slow")
        wait_until(lambda: model.in_flight_count == 1)
        yield url, grpc.port
        (tmp_path / "slow" / "1" / "go").touch()
        thread.join(60)
        assert first == [200]
        assert httpx.post(f"{url}/infer", json=INFER, timeout=60).status_code == 200
        assert model.statistics.snapshot()["inference_stats"]["fail"]["count"] == 1


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_kserve_http_answers_503(busy: tuple[str, int], path: str) -> None:
    body = INFER if path == "infer" else {"IN": [1.0]}
    response = httpx.post(f"{busy[0]}/{path}", content=orjson.dumps(body), timeout=60)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "too many requests: this client has 1 sequences in flight" in response.json()["error"]


@pytest.mark.parametrize("streamed", [False, True])
def test_grpc_answers_unavailable(busy: tuple[str, int], streamed: bool) -> None:
    errors: list[grpc_client.InferenceServerException] = []
    done = threading.Event()

    def on_response(result: object, error: grpc_client.InferenceServerException | None) -> None:
        if error is not None:
            errors.append(error)
        done.set()

    with grpc_client.InferenceServerClient(f"127.0.0.1:{busy[1]}") as client:
        tensor = grpc_client.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        if streamed:
            client.start_stream(on_response)
            client.async_stream_infer("slow", [tensor])
        else:
            client.async_infer("slow", [tensor], on_response)
        assert done.wait(60)
    assert "too many requests" in errors[0].message()
    assert streamed or "UNAVAILABLE" in errors[0].status()
