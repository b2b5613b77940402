"""A repository of stateful models, used as in Triton's examples: many concurrent sequences."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from server_process import ServerProcess

REPOSITORY = Path(__file__).parent / "repositories" / "sequences"
VALUES = [11, 7, 5, 3, 2, 0, 1]


@pytest.fixture(scope="module")
def sequences() -> Iterator[ServerProcess]:
    with ServerProcess("--model-repository", REPOSITORY) as process:
        assert process.ports, process.output
        yield process


def tensor(module: Any, name: str, value: int) -> list[Any]:
    result = module.InferInput(name, [1, 1], "INT32")
    result.set_data_from_numpy(np.array([[value]], np.int32))
    return [result]


class Stream:
    """A gRPC stream that collects responses by request id."""

    def __init__(self, server: ServerProcess) -> None:
        self.client = grpc_client.InferenceServerClient(server.address("grpc"))
        self.answers: queue.Queue[Any] = queue.Queue()

    def __enter__(self) -> Stream:
        self.client.start_stream(lambda result, error: self.answers.put((result, error)))
        return self

    def __exit__(self, *exception: object) -> None:
        self.client.stop_stream()
        self.client.close()

    def take(self, count: int, output: str) -> dict[str, list[int]]:
        numbers: dict[str, list[int]] = {}
        for _ in range(count):
            result, error = self.answers.get(timeout=60)
            assert error is None, error
            numbers.setdefault(result.get_response().id, []).append(result.as_numpy(output).item())
        return numbers


def expected(model: str, sequence: int, values: list[int]) -> list[int]:
    sums = list(accumulate(values))
    if model == "simple_dyna_sequence":
        sums[-1] += sequence % 1000
    return sums


@pytest.mark.parametrize("model", ["simple_sequence", "simple_dyna_sequence"])
def test_sequences_of_different_lengths_in_one_stream(sequences: ServerProcess, model: str) -> None:
    ids = [1001, 1002, 1003, 2**63 - 1, 1005, 1006]  # more than simple_sequence has slots
    values = {
        sequence: [index * 100 + value for value in VALUES[index:]] for index, sequence in enumerate(ids)
    }
    with Stream(sequences) as stream:
        for position in range(len(VALUES)):
            for sequence, of_sequence in values.items():
                if position < len(of_sequence):
                    stream.client.async_stream_infer(
                        model,
                        tensor(grpc_client, "INPUT", of_sequence[position]),
                        request_id=str(sequence),
                        sequence_id=sequence,
                        sequence_start=position == 0,
                        sequence_end=position == len(of_sequence) - 1,
                    )
        sums = stream.take(sum(map(len, values.values())), "OUTPUT")
    assert sums == {str(sequence): expected(model, sequence, of) for sequence, of in values.items()}


@pytest.mark.parametrize("model", ["simple_sequence", "simple_dyna_sequence"])
def test_sequences_of_several_clients_over_http(sequences: ServerProcess, model: str) -> None:
    def play(factor: int) -> list[int]:
        sums = []
        with http_client.InferenceServerClient(sequences.address("http")) as client:
            for position, value in enumerate(VALUES):
                result = client.infer(
                    model,
                    tensor(http_client, "INPUT", value * factor),
                    sequence_id=2**64 - factor,
                    sequence_start=position == 0,
                    sequence_end=position == len(VALUES) - 1,
                )
                sums.append(result.as_numpy("OUTPUT").item())
                time.sleep(0.002 * (factor % 3))  # so that slots are sometimes empty
        return sums

    with ThreadPoolExecutor(6) as pool:
        played = list(pool.map(play, range(1, 7)))
    assert played == [expected(model, 2**64 - f, [value * f for value in VALUES]) for f in range(1, 7)]


def test_iterative_sequences_in_one_stream(sequences: ServerProcess) -> None:
    counts = [5, 40, 1, 12, 7, 3]
    with Stream(sequences) as stream:
        for count in counts:  # no sequence ids, no flags
            stream.client.async_stream_infer(
                "simple_iterative", tensor(grpc_client, "IN", count), request_id=f"down from {count}"
            )
        left = stream.take(sum(counts), "OUT")
    assert left == {f"down from {count}": list(range(count - 1, -1, -1)) for count in counts}
    with grpc_client.InferenceServerClient(sequences.address("grpc")) as statistics:
        (model,) = statistics.get_inference_statistics("simple_iterative", as_json=True)["model_stats"]
    assert int(model["inference_count"]) == len(counts)
    assert max(counts) <= int(model["execution_count"]) < sum(counts)  # in batches


def test_disconnect_ends_an_iterative_sequence(sequences: ServerProcess) -> None:
    with Stream(sequences) as stream:
        for _ in range(4):  # all slots
            stream.client.async_stream_infer("simple_iterative", tensor(grpc_client, "IN", 10**6))
        stream.take(8, "OUT")
        stream.client.stop_stream(cancel_requests=True)
    with Stream(sequences) as stream:
        stream.client.async_stream_infer("simple_iterative", tensor(grpc_client, "IN", 2), request_id="next")
        assert stream.take(2, "OUT") == {"next": [1, 0]}
