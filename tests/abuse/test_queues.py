"""Clients that send more requests than the server can process."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import orjson
import pytest
from attack import AttackedServer, write_python_model

pytestmark = pytest.mark.alone

SLOW = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.5)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy()[:1])])
            for request in requests
        ]
"""
CONFIG = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
OWN_PROCESS = 'parameters { key: "EXECUTION_MODE" value { string_value: "process" } }\n'
ATTACKER = "127.0.0.2"
NUM_VALUES = 2_000_000  # 8 MB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    repository = tmp_path_factory.mktemp("repository")
    write_python_model(repository, "slow", CONFIG, SLOW)
    write_python_model(repository, "slow_process", CONFIG + OWN_PROCESS, SLOW)
    for name, backend in (("pilot", "llm"), ("embedder", "embedding")):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(f'backend: "{backend}"')
        (repository / name / "1" / "model.json").write_text('{"model": "neso-pilot", "num_blocks": 1024}')
    with AttackedServer("--max-inflight-input-bytes=100000000", repository=repository) as server:
        yield server


def completion(
    server: AttackedServer, body: dict[str, object], source: str = "127.0.0.1"
) -> tuple[int, str | None]:
    """Return the status and Retry-After of a completion."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.ports["http"], timeout=120, source_address=(source, 0)
    )
    connection.request("POST", "/v1/completions", orjson.dumps({"model": "pilot", **body}))
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status, response.getheader("retry-after")


def test_flood_of_sequences(server: AttackedServer) -> None:
    """Requests with 160 sequences each, of which a client may have 4,096 in flight."""
    statuses: Counter[tuple[int, str | None]] = Counter()
    others: list[tuple[int, float]] = []
    body = {"prompt": ["a"] * 20, "n": 8, "max_tokens": 50, "ignore_eos": True}
    stop = threading.Event()
    assert completion(server, {"prompt": "b", "max_tokens": 2}) == (200, None)

    def attacker() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # the server stops
            while not stop.is_set():
                statuses[completion(server, body, ATTACKER)] += 1

    def flood_of_sequences() -> None:
        for _ in range(64):
            threading.Thread(target=attacker, daemon=True).start()
        end = time.monotonic() + 10
        while time.monotonic() < end:
            started = time.monotonic()
            status, _ = completion(server, {"prompt": "b", "max_tokens": 2})
            others.append((status, round(time.monotonic() - started, 2)))
        stop.set()

    report = server.attack(flood_of_sequences)
    print(f"answers to the attacker: {dict(statuses)}, to another client: {others}")
    report.check(limit_mib=64)
    assert statuses[429, "1"] > 10
    assert others and {status for status, _ in others} == {200}


def test_flood_of_embeddings(server: AttackedServer) -> None:
    """Requests with 512 texts, of which a client may have eight in flight: those are completed."""
    statuses: Counter[int] = Counter()
    body = orjson.dumps({"model": "embedder", "input": ["one two three"] * 512})

    def send() -> None:
        connection = http.client.HTTPConnection(
            "127.0.0.1", server.ports["http"], timeout=120, source_address=("127.0.0.3", 0)
        )
        connection.request("POST", "/v1/embeddings", body)
        response = connection.getresponse()
        response.read()
        connection.close()
        statuses[response.status] += 1

    def flood_of_embeddings() -> None:
        threads = [threading.Thread(target=send) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    report = server.attack(flood_of_embeddings)
    print(f"statuses: {dict(statuses)}")
    report.check(limit_mib=100)
    assert set(statuses) == {200, 429} and statuses[200] >= 4


def test_request_of_many_sequences(server: AttackedServer) -> None:
    body = {"prompt": ["a"] * 1024, "n": 128, "max_tokens": 10}
    assert len(orjson.dumps(body)) < 10_000

    def requests_of_131072_sequences() -> None:
        for _ in range(5):
            assert completion(server, body) == (400, None)

    server.attack(requests_of_131072_sequences).check()


@pytest.mark.parametrize("model", ["slow", "slow_process"])
def test_tensors_of_one_client(server: AttackedServer, model: str) -> None:
    statuses: Counter[int] = Counter()
    tensor = np.zeros(NUM_VALUES, np.float32).tobytes()
    description = {
        "name": "IN",
        "datatype": "FP32",
        "shape": [NUM_VALUES],
        "parameters": {"binary_data_size": len(tensor)},
    }
    head = orjson.dumps({"inputs": [description]})

    def send() -> None:
        connection = http.client.HTTPConnection(
            "127.0.0.1", server.ports["http"], timeout=60, source_address=(ATTACKER, 0)
        )
        for _ in range(2):
            headers = {"Inference-Header-Content-Length": str(len(head))}
            connection.request("POST", f"/v2/models/{model}/infer", head + tensor, headers)
            response = connection.getresponse()
            response.read()
            statuses[response.status] += 1
            assert response.status != 503 or response.getheader("retry-after") == "1"
        connection.close()

    def tensors_of_one_client() -> None:
        threads = [threading.Thread(target=send) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # One client may have 50 MB in flight, which both processes map. Bodies that are being received are not counted yet.
    report = server.attack(tensors_of_one_client, f"tensors of one client to {model}")
    print(f"statuses: {dict(statuses)}")
    report.check(limit_mib=2 * 50 + 24 * 16)
    assert set(statuses) == {200, 503}
