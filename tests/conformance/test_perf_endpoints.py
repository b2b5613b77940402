"""`neso perf` against Neso's own servers: tensors, sequences, shared memory, rankings, images, users."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_models import DECOUPLED_CODE, MODELS, write_models
from eventually import wait_until
from perf_command import REQUESTS, perf, requests_of
from server_process import ServerProcess

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from checkpoints import make_encoder, make_llava

pytestmark = pytest.mark.slow

SEQUENCES = (
    "INT32",
    "1",
    "sequence_batching { control_input { name: 'START' control { kind: CONTROL_SEQUENCE_START "
    "int32_false_true: [0, 1] } } control_input { name: 'END' control { kind: CONTROL_SEQUENCE_END "
    "int32_false_true: [0, 1] } } }",
)
"""A model as in `MODELS`."""
SEQUENCE_CODE = """
    def execute(self, requests):
        responses = []
        for request in requests:
            controls = [pb_utils.get_input_tensor_by_name(request, name) for name in ("START", "END")]
            print("SEQUENCE", request.correlation_id(), *(one.as_numpy().item() for one in controls), flush=True)
            responses.append(echo(request))
        return responses
"""


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    methods = {"decoupled": DECOUPLED_CODE, "sequence": SEQUENCE_CODE}
    write_models(repository, {**MODELS, "sequence": SEQUENCES}, methods)
    with ServerProcess("--model-repository", repository, "--allow-client-shm", "true") as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model of embeddings, a reranker and a vision model."""
    root = tmp_path_factory.mktemp("encoders")
    models = {
        "embedder": make_encoder(root / "embedder", "bert"),
        "reranker": make_encoder(root / "reranker", "xlm-roberta", labels=1),
        "llava": make_llava(root / "llava"),
    }
    with ServerProcess(*(f"{name}={path}" for name, path in models.items())) as process:
        assert process.ports, process.output
        yield process


PROTOCOLS = pytest.mark.parametrize(("endpoint", "protocol"), [("kserve_http", "http"), ("kserve", "grpc")])


@PROTOCOLS
@pytest.mark.parametrize(
    ("model", "memory", "options"),
    [
        ("fixed", "system", []),
        ("variable", "none", ["--shape", "X:5,8", "-b", "4"]),
        ("strings", "system", ["-b", "2", "--string-length", "200"]),
    ],
    ids=["fixed", "variable", "strings"],
)
def test_tensor_models(tensors, tmp_path, endpoint, protocol, model, memory, options):
    before = tensors.gauge("nv_inference_request_success")
    perf(
        tensors.address(protocol), tmp_path, model, endpoint,
        "--concurrency", "3", "--shared-memory", memory, *options,
    )  # fmt: skip
    assert tensors.gauge("nv_inference_request_success") - before == REQUESTS
    status, regions = tensors.get("/v2/systemsharedmemory/status")
    assert (status, json.loads(regions)) == (200, [])


def test_responses_of_a_decoupled_model_in_shared_memory(tensors, tmp_path):
    perf(tensors.address("grpc"), tmp_path, "decoupled", "kserve", "--streaming", "--shared-memory", "system")
    assert all(len(one["metrics"]["inter_chunk_latency"]["value"]) == 2 for one in requests_of(tmp_path))


def test_outputs_in_shared_memory_must_fit(tensors, tmp_path):
    failed = perf(
        tensors.address("http"), tmp_path, "strings", "kserve_http", "--shared-memory", "system",
        "--output-shared-memory-size", "16", status=1,
    )  # fmt: skip
    assert "should be at least" in " ".join(failed["output"].split())


def test_shared_memory_is_for_tensor_models_of_servers_that_allow_it(server, encoders, tmp_path):
    shared = ["--shared-memory", "system"]
    failed = perf(server.address("grpc"), tmp_path, "neso-pilot", "kserve", *shared, status=1)
    assert "--shared-memory: only for tensor models" in failed["output"]
    for endpoint, protocol in (("kserve_http", "http"), ("kserve", "grpc")):
        failed = perf(
            encoders.address(protocol), tmp_path, "embedder", endpoint, *shared, "--backend", "tensor",
            "--shape", "text_input:1", "text_pair:1", "dimensions:1", "normalize:1", "truncate:1", status=1,
        )  # fmt: skip
        assert "shared memory" in failed["output"], failed["output"]


@PROTOCOLS
def test_sequences_have_a_start_and_an_end(tensors, tmp_path, endpoint, protocol):
    before = tensors.output.count("SEQUENCE")
    perf(
        tensors.address(protocol), tmp_path, "sequence", endpoint,
        "--concurrency", "2", "--sequence-length", "4", "--extra-inputs", "priority:1",
    )  # fmt: skip
    wait_until(lambda: tensors.output.count("SEQUENCE") == before + REQUESTS)
    lines = [line.split()[1:] for line in tensors.output.splitlines() if line.startswith("SEQUENCE")]
    sequences: dict[str, list[str]] = {}
    for name, start, end in lines[before:]:
        sequences.setdefault(name, []).append(start + end)
    assert len(sequences) == REQUESTS / 4
    assert all(places == ["10", "00", "00", "01"] for places in sequences.values())


@pytest.mark.parametrize("endpoint", ["nim-rankings", "cohere-rankings"])
def test_rankings(encoders, tmp_path, endpoint):
    found = perf(
        encoders.address("openai"), tmp_path, "reranker", endpoint, "--concurrency", "2",
        "--rankings-passages-mean", "3", "--rankings-passages-prompt-token-mean", "12",
        "--rankings-query-prompt-token-mean", "6",
    )  # fmt: skip
    # The server's tokenizer is not that of the synthetic texts; each pair also has special tokens.
    assert found["input_sequence_length"]["min"] > 3 * (12 + 6)
    assert found["item_throughput"]["avg"] == pytest.approx(3 * found["request_throughput"]["avg"])


def test_embeddings(encoders, tmp_path):
    found = perf(
        encoders.address("openai"),
        tmp_path,
        "embedder",
        "embeddings",
        "--isl",
        "12",
        "--batch-size-text",
        "4",
    )
    assert found["item_throughput"]["avg"] == pytest.approx(4 * found["request_throughput"]["avg"])


@pytest.mark.parametrize("streaming", [True, False])
def test_vision(encoders, tmp_path, streaming):
    found = perf(
        encoders.address("openai"), tmp_path, "llava", "vision", "--isl", "10", "--osl", "4",
        "--extra-inputs", "ignore_eos:true", "--image-width-mean", "40", "--image-height-mean", "30",
        "--image-format", "random", "--batch-size-image", "2", "--tokenizer", "neso-pilot",
        *(["--streaming"] if streaming else []),
    )  # fmt: skip
    # Each image has 16 tokens.
    assert found["input_sequence_length"]["min"] > 2 * 16
    assert found["output_sequence_length"]["min"] == found["output_sequence_length"]["max"] == 4
    assert ("time_to_first_token" in found) == streaming


def test_users_with_sessions(server, tmp_path):
    found = perf(
        server.address("openai"), tmp_path, "neso-pilot", "chat", "--streaming", "--isl", "8", "--osl", "3",
        "--session-turns-mean", "3", "--user-centric-rate", "20", "--num-users", "6", "--prefill-concurrency", "2",
    )  # fmt: skip
    starts = sorted(one["metadata"]["request_intended_ns"] for one in requests_of(tmp_path))
    assert found["input_config"]["load"] == {
        "user_centric_rate": 20, "num_users": 6, "prefill_concurrency": 2,
    }  # fmt: skip
    # Turns are never sent early, but later if the last response is late.
    assert starts[-1] - starts[0] >= (REQUESTS - 1) / 20 * 1e9 - 1e7
