"""An ensemble of an encoder, a language model and post-processing, each on workers of its own, in real processes."""

from __future__ import annotations

import http.client
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc
from eventually import wait_until
from server_process import ServerProcess
from step_pace import slow_environment
from test_stages import write_model
from triton_tokens import TRUE, prompt_inputs, tensors, token_stream

import neso
from neso.models import SHIPPED_MODELS

sys.path.append(str(Path(__file__).parents[1] / "backends" / "tensorrtllm"))
from trtllm_repository import write_model as write_tokens_model

pytestmark = pytest.mark.slow

LENGTH = 24
SAMPLING = {"temperature": 0.8, "seed": 5, "max_tokens": LENGTH, "ignore_eos": True}
ENCODER = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            seed = int(request.inputs()[0].as_numpy()[0])
            vectors = np.random.default_rng(seed).normal(0, 0.05, (96, 256)).astype(np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", vectors)]))
        return responses
"""
POST = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [request.inputs()[0].as_numpy() for request in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("POST", np.array([b"<" + t + b">" for t in text], object))])
            for text in texts
        ]
"""
POST_CONFIG = """
backend: "python"
input { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "POST" data_type: TYPE_STRING dims: [ -1 ] }
"""
ENSEMBLE = """
platform: "ensemble"
input [
  { name: "SEED" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output { name: "POST" data_type: TYPE_STRING dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "encoder" model_version: -1
    input_map { key: "X" value: "SEED" }
    output_map { key: "Y" value: "vectors" }
  }
  step {
    model_name: "llm" model_version: -1
    input_map [ { key: "text_input" value: "text_input" }, { key: "stream" value: "stream" } ]
    input_map { key: "prompt_embeds" value: "vectors" }
    output_map { key: "text_output" value: "text" }
  }
  step {
    model_name: "post" model_version: -1
    input_map { key: "TEXT" value: "text" }
    output_map { key: "POST" value: "POST" }
  }
}
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "encoder", ENCODER)
    config = repository / "encoder" / "config.pbtxt"
    config.write_text(
        config.read_text().replace(
            '"Y" data_type: TYPE_FP32 dims: [ -1 ]', '"Y" data_type: TYPE_FP32 dims: [ -1, -1 ]'
        )
    )
    for name, text in (
        ("post", POST_CONFIG),
        ("llm", 'backend: "llm"'),
        ("pipeline", ENSEMBLE),
        ("embed", 'backend: "embedding"'),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text)
    (repository / "post" / "1" / "model.py").write_text(POST)
    options = {"model": "neso-pilot", "num_blocks": 1024, "max_num_seqs": 4, "max_queue_size": 4}
    write_tokens_model(repository, SHIPPED_MODELS["neso-pilot"])
    for name in ("llm", "embed"):
        (repository / name / "1" / "model.json").write_text(json.dumps(options))
    return repository


class Pipeline:
    """A server of the ensemble. `stages`: number of workers by model."""

    def __init__(self, repository: Path, slow: Path, **stages: int) -> None:
        self.process = ServerProcess(
            f"--model-repository={repository}",
            *(f"--stage={name}={count}" for name, count in stages.items()),
            environment=slow_environment(slow, 0.03),
        )
        assert self.process.ports, self.process.output

    def body(self, seed: int, **changes: Any) -> dict[str, Any]:
        return {"SEED": [float(seed)], "text_input": "", "stream": True, **SAMPLING, **changes}

    def open(self, seed: int, **changes: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.process.address("http"), timeout=120)
        body = json.dumps(self.body(seed, **changes))
        connection.request("POST", "/v2/models/pipeline/generate_stream", body)
        return connection, connection.getresponse()

    def stream(self, seed: int, **changes: Any) -> list[Any]:
        """Return the events of a stream."""
        connection, response = self.open(seed, **changes)
        try:
            assert response.status == 200
            return [json.loads(line[5:]) for line in response if line.startswith(b"data:")]
        finally:
            connection.close()

    def texts(self, seed: int, **changes: Any) -> list[str]:
        return [event["POST"] for event in self.stream(seed, **changes)]

    def workers(self, model: str) -> list[psutil.Process]:
        children = psutil.Process(self.process.process.pid).children()
        return [child for child in children if f'{{"model":"{model}"' in child.cmdline()[-1]]

    def count(self, model: str, name: str) -> float:
        return self.process.metrics().get(f'neso_stage_{name}{{model="{model}",version="1"}}', 0.0)

    def gauge(self, name: str) -> float:
        return self.process.metrics().get(f'{name}{{model="llm",version="1"}}', 0.0)

    def requests(self) -> dict[str, float]:
        """Return the number of requests of each worker of the language model."""
        name = 'neso_stage_worker_requests{model="llm",version="1",worker="'
        return {
            key[len(name) : -2]: value
            for key, value in self.process.metrics().items()
            if key.startswith(name)
        }

    def busy_worker(self) -> psutil.Process:
        (name,) = [name for name, count in self.requests().items() if count]
        (worker,) = [one for one in self.workers("llm") if f'"name":"{name}"' in one.cmdline()[-1]]
        return worker

    def complete(self) -> None:
        wait_until(lambda: self.count("llm", "workers") == 2, 120)


@pytest.fixture(scope="module")
def staged(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    pipeline = Pipeline(
        repository, tmp_path_factory.mktemp("slow"), encoder=1, llm=2, post=2, embed=1, tensorrt_llm=1
    )
    with pipeline.process:
        yield pipeline


@pytest.fixture(scope="module")
def expected(repository: Path) -> dict[int, list[str]]:
    """The responses of the ensemble in one process, by seed."""
    with neso.Server(
        model_repository=repository, model_control_mode="explicit", startup_models=["pipeline"]
    ) as server:
        return {seed: one_process(server, seed) for seed in range(6)}


def one_process(server: neso.Server, seed: int) -> list[str]:
    inputs = {"SEED": np.float32([seed]), "text_input": [b""], "stream": np.array([True])}
    responses = server.model("pipeline").infer(inputs=inputs, parameters=SAMPLING)
    return [response.outputs["POST"].to_string_array()[0] for response in responses if response.outputs]


def test_streams_over_stages_are_those_of_one_process(staged: Pipeline, expected: dict[int, list[str]]):
    with ThreadPoolExecutor(len(expected)) as pool:
        streams = list(pool.map(staged.texts, expected))
    for seed, stream in enumerate(streams):
        assert "".join(stream).replace("><", "") == "".join(expected[seed]).replace("><", ""), seed
        assert len(stream) > LENGTH / 2
    assert staged.count("llm", "grants_total") == 6
    assert staged.count("encoder", "kept_tensors_total") == 6, "embeddings go from worker to worker"
    wait_until(lambda: staged.gauge("vllm:generation_tokens_total") == 6 * LENGTH)
    assert staged.gauge("vllm:time_to_first_token_seconds_count") == 6
    used = {
        key
        for key, value in staged.process.metrics().items()
        if "neso_stage_worker_slots" in key and "llm" in key and value == 4
    }
    assert len(used) == 2


def test_workers_are_filled_and_further_requests_wait_within_the_limits_of_the_engine(staged: Pipeline):
    """A worker has 4 sequences, the queue 4 requests."""
    staged.complete()
    running = [staged.open(seed, max_tokens=1500) for seed in range(8)]
    try:
        wait_until(lambda: list(staged.requests().values()) == [4, 4])
        wait_until(lambda: staged.gauge("vllm:num_requests_running") == 8)
        late = grpc_stream(staged, 0, timeout=200_000)
        assert "Request timeout expired" in str(late[-1][1])
        with ThreadPoolExecutor(6) as pool:
            further = [pool.submit(staged.open, seed) for seed in range(6)]
            wait_until(lambda: sum(one.done() for one in further) == 2)
            assert staged.count("llm", "queued_requests") == 4
            statuses = [one.result()[1].status for one in further if one.done()]
            close(running)
            answers = [one.result() for one in further]
        assert statuses == [503, 503]
        assert sorted(response.status for _, response in answers) == [200] * 4 + [503] * 2
        assert all(response.read() for _, response in answers)
        close(answers)
    finally:
        close(running)


def close(opened: list[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]) -> None:
    for connection, response in opened:
        response.close()
        connection.close()


def grpc_stream(staged: Pipeline, seed: int, **options: Any) -> list[tuple[Any, Any]]:
    """Return the results and errors of a stream."""
    values = {"SEED": np.float32([seed]), "text_input": np.array([b""], object), "stream": np.array([True])}
    found: list[tuple[Any, Any]] = []
    with grpc.InferenceServerClient(staged.process.address("grpc")) as client:
        client.start_stream(lambda result, error: found.append((result, error)))
        client.async_stream_infer(
            "pipeline", tensors(values), parameters=SAMPLING, enable_empty_final_response=True, **options
        )
        wait_until(lambda: found and (found[-1][1] or final(found[-1][0])), 120)
        client.stop_stream()
    return found


def test_grpc_stream(staged: Pipeline, expected: dict[int, list[str]]):
    found = grpc_stream(staged, 3)
    assert not any(error for _, error in found)
    arrays = [result.as_numpy("POST") for result, _ in found]
    text = b"".join(array[0] for array in arrays if array is not None)
    assert text.decode().replace("><", "") == "".join(expected[3]).replace("><", "")


def final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def test_request_of_a_killed_worker_is_repeated_if_nothing_was_sent(
    staged: Pipeline, expected: dict[int, list[str]]
):
    staged.complete()
    retries = staged.count("llm", "retries_total")
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(staged.texts, 2, stream=False)
        wait_until(lambda: sum(staged.requests().values()) == 1)
        staged.busy_worker().kill()
        assert "".join(whole.result()) == "<" + "".join(expected[2]).replace("<", "").replace(">", "") + ">"
    assert staged.count("llm", "retries_total") == retries + 1
    staged.complete()


def test_request_continues_on_another_worker_when_an_engine_has_ended(
    staged: Pipeline, expected: dict[int, list[str]]
):
    staged.complete()
    retries = staged.count("llm", "retries_total")
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(staged.texts, 2, stream=False)
        wait_until(lambda: sum(staged.requests().values()) == 1)
        for engine in staged.busy_worker().children():
            engine.kill()
        assert "".join(whole.result()) == "<" + "".join(expected[2]).replace("<", "").replace(">", "") + ">"
    assert staged.count("llm", "retries_total") == retries + 1
    staged.complete()


def test_stream_of_a_killed_worker_ends_with_an_error(staged: Pipeline):
    staged.complete()
    connection, response = staged.open(2)
    try:
        lines = (line for line in response if line.startswith(b"data:"))
        for _ in range(3):
            next(lines)
        staged.busy_worker().kill()
        last = json.loads([*lines][-1][5:])
    finally:
        connection.close()
    assert "its worker was lost after it has sent responses" in last["error"]
    staged.complete()
    assert staged.texts(1)


def test_client_that_disconnects_cancels_the_request_in_the_engine(staged: Pipeline):
    staged.complete()
    connection, response = staged.open(2, max_tokens=1500)
    next(line for line in response if line.startswith(b"data:"))
    wait_until(lambda: staged.gauge("vllm:num_requests_running") == 1)
    response.close()
    connection.close()
    wait_until(
        lambda: staged.gauge("vllm:num_requests_running") == 0 and not sum(staged.requests().values()), 20
    )
    wait_until(lambda: staged.gauge("vllm:kv_cache_usage_perc") == 0, 20)


def test_request_is_stopped_by_its_id_on_its_worker(staged: Pipeline):
    with token_stream(staged.process.address("grpc")) as stream:
        stream.send(prompt_inputs([5, 6, 7], 1500, streaming=TRUE), "a")
        assert not stream.receive()[2]
        with token_stream(staged.process.address("grpc")) as other:
            other.send_request({"stop": TRUE, **prompt_inputs([5], 1)}, "a")
        number = 1
        while not stream.receive()[2]:
            number += 1
        assert number < 1000


def test_embeddings_on_a_worker(staged: Pipeline, repository: Path):
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["one", "two"]}
    status, body = staged.process.post("/v2/models/embed/infer", {"inputs": [tensor]})
    assert status == 200, body
    (found,) = [output["data"] for output in body["outputs"] if output["name"] == "embedding"]
    with neso.Server(
        model_repository=repository, model_control_mode="explicit", startup_models=["embed"]
    ) as server:
        (response,) = server.model("embed").infer(inputs={"text_input": [b"one", b"two"]})
        np.testing.assert_allclose(found, response.outputs["embedding"].numpy().reshape(-1), rtol=1e-5)
