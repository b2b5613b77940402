"""`response_stats` of a real server, over HTTP and gRPC."""

from __future__ import annotations

import queue

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from eventually import wait_until
from server_process import ServerProcess
from step_pace import slow_environment

MS = 1_000_000

CONFIG = """
backend: "python"
input { name: "WAIT_MS" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in pb_utils.get_input_tensor_by_name(request, "WAIT_MS").as_numpy():
                time.sleep(number / 1000)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", number.reshape(1))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    (folder / "paced" / "1").mkdir(parents=True)
    (folder / "paced" / "config.pbtxt").write_text(CONFIG)
    (folder / "paced" / "1" / "model.py").write_text(MODEL)
    slow = slow_environment(tmp_path_factory.mktemp("slow"))  # so that a cancelled request is still running
    with ServerProcess("neso-pilot", f"--model-repository={folder}", environment=slow) as server:
        yield server


def counts(stats, place: int) -> dict[str, int]:
    """Return the nonzero counts at an index."""
    return {name: each["count"] for name, each in stats[str(place)].items() if each["count"]}


def statistics(served, model: str):
    with http_client.InferenceServerClient(served.address("http")) as triton:
        [stats] = triton.get_inference_statistics(model)["model_stats"]
    return stats


def test_both_protocols_return_the_same_statistics(served):
    results: queue.Queue = queue.Queue()
    with grpc_client.InferenceServerClient(served.address("grpc")) as triton:
        triton.start_stream(lambda result, error: results.put(error or result))
        tensor = grpc_client.InferInput("WAIT_MS", [2], "INT32")
        tensor.set_data_from_numpy(np.array([20, 1], np.int32))
        triton.async_stream_infer("paced", [tensor], enable_empty_final_response=True)
        for _ in range(3):
            results.get(timeout=60)
        triton.stop_stream()
        [by_grpc] = triton.get_inference_statistics("paced").model_stats
    by_http = statistics(served, "paced")["response_stats"]
    assert counts(by_http, 0) == {"compute_infer": 1, "compute_output": 1, "success": 1}
    assert counts(by_http, 2) == {"empty_response": 1}
    assert by_http["0"]["compute_infer"]["ns"] >= 20 * MS
    assert by_grpc.response_stats.keys() == by_http.keys()
    for place, durations in by_http.items():
        for name, each in durations.items():
            found = getattr(by_grpc.response_stats[place], name)
            assert (found.count, found.ns) == (each["count"], each["ns"])


def test_first_response_duration_of_a_language_model(served):
    body = {"text_input": "Hello", "max_tokens": 4, "ignore_eos": True}
    assert served.post("/v2/models/neso-pilot/generate", body)[0] == 200
    wait_until(lambda: statistics(served, "neso-pilot")["inference_stats"]["success"]["count"] == 1)
    stats = statistics(served, "neso-pilot")
    assert counts(stats["response_stats"], 0)["success"] == 1
    whole = stats["inference_stats"]["success"]["ns"]
    assert 0.5 * whole < stats["response_stats"]["0"]["compute_infer"]["ns"] <= whole


def test_cancelled_stream(served):
    with grpc_client.InferenceServerClient(served.address("grpc")) as triton:
        results: queue.Queue = queue.Queue()
        triton.start_stream(lambda result, error: results.put(error or result))
        inputs = [
            grpc_client.InferInput("text_input", [1], "BYTES"),
            grpc_client.InferInput("stream", [1], "BOOL"),
        ]
        inputs[0].set_data_from_numpy(np.array([b"Hello"], np.object_))
        inputs[1].set_data_from_numpy(np.array([True]))
        parameters = {"ignore_eos": True, "max_tokens": 1500}
        triton.async_stream_infer("neso-pilot", inputs, parameters=parameters)
        results.get(timeout=60)
        triton.stop_stream(cancel_requests=True)

    def cancelled() -> int:
        found = statistics(served, "neso-pilot")["response_stats"]
        return sum(place["cancel"]["count"] for place in found.values())

    wait_until(lambda: cancelled() == 1)
