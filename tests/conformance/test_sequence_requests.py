"""Sequences with `tritonclient`: two interleaved on one gRPC stream, and over HTTP."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException

CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
sequence_batching {
  %s
  state { input_name: "SUM" output_name: "NEXT" data_type: TYPE_INT32 dims: [ 1 ] }
}
instance_group { count: 2 }
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            total = inputs["SUM"] + inputs["IN"]
            outputs = [pb_utils.Tensor("OUT", total), pb_utils.Tensor("NEXT", total)]
            responses.append(pb_utils.InferenceResponse(outputs))
        return responses
"""
STRATEGIES = {"direct": "direct { }", "oldest": "oldest { max_candidate_sequences: 4 }"}


@pytest.fixture(scope="module")
def adders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("models")
    for name, strategy in STRATEGIES.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG % strategy)
        (repository / name / "1" / "model.py").write_text(MODEL)
    with ServerProcess("--model-repository", repository) as process:
        assert process.ports, process.output
        yield process


def inputs(module, value: int) -> list:
    tensor = module.InferInput("IN", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return [tensor]


@pytest.mark.parametrize("name", STRATEGIES)
def test_sequences_in_one_stream(adders, name) -> None:
    answers: queue.Queue = queue.Queue()
    with grpc_client.InferenceServerClient(f"127.0.0.1:{adders.ports['grpc']}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for value in (1, 2, 3):
            for sequence, factor in ((7, 1), ("eight", 10)):
                client.async_stream_infer(
                    name,
                    inputs(grpc_client, value * factor),
                    request_id=f"{sequence}",
                    sequence_id=sequence,
                    sequence_start=value == 1,
                    sequence_end=value == 3,
                )
        sums: dict[str, list[int]] = {}
        for _ in range(6):
            result, error = answers.get(timeout=60)
            assert error is None, error
            sums.setdefault(result.get_response().id, []).append(result.as_numpy("OUT").item())
        client.stop_stream()
    assert sums == {"7": [1, 3, 6], "eight": [10, 30, 60]}


@pytest.mark.parametrize("name", STRATEGIES)
def test_sequences_over_http(adders, name) -> None:
    with http_client.InferenceServerClient(f"127.0.0.1:{adders.ports['http']}") as client:
        sums = [
            client.infer(
                name,
                inputs(http_client, value),
                sequence_id=9,
                sequence_start=value == 1,
                sequence_end=value == 3,
            )
            .as_numpy("OUT")
            .item()
            for value in (1, 2, 3)
        ]
        assert sums == [1, 3, 6]
        for options, words in (
            ({}, "must specify a non-zero or non-empty correlation ID"),
            ({"sequence_id": 9}, "must specify the START flag on the first request of the sequence"),
        ):
            with pytest.raises(InferenceServerException, match=words):
                client.infer(name, inputs(http_client, 1), **options)
