"""Triton's perf_analyzer with generated inputs; see perf_tools for its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_models import DECOUPLED_CODE, DECOUPLED_RESPONSES, MODELS, write_models
from perf_tools import run, tool
from server_process import ServerProcess

pytestmark = pytest.mark.slow

REQUESTS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tool("perf_analyzer")
    repository = tmp_path_factory.mktemp("repository")
    write_models(repository, MODELS, {"decoupled": DECOUPLED_CODE})
    with ServerProcess("--model-repository", repository, "--allow-client-shm", "true") as process:
        assert process.ports, process.output
        yield process


def responses(server: ServerProcess, protocol: str, folder: Path, *options: str) -> list[int]:
    """Run perf_analyzer; returns the number of responses of each request."""
    export = folder / "export.json"
    run([
        tool("perf_analyzer"), "-i", protocol, "-u", server.address(protocol), *options,
        "--request-count", str(REQUESTS), "--profile-export-file", str(export),
    ])  # fmt: skip
    # Tensors are in the file as raw bytes.
    (experiment,) = json.loads(export.read_text(errors="replace"), strict=False)["experiments"]
    return [len(request["response_timestamps"]) for request in experiment["requests"]]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "options",
    [
        ["-m", "fixed", "--input-data", "random"],
        ["-m", "fixed", "--input-data", "zero", "--async", "--concurrency-range", "4"],
        ["-m", "fixed", "--request-rate-range", "40"],
        ["-m", "fixed", "--shared-memory", "system", "--output-shared-memory-size", "128"],
        ["-m", "variable", "--shape", "X:5,8", "-b", "4"],
        ["-m", "strings", "--string-data", "hello"],
        ["-m", "strings", "--string-length", "20"],
    ],
    ids=lambda options: "".join(options[1:4]),
)
def test_generated_inputs(server, tmp_path, protocol, options):
    found = responses(server, protocol, tmp_path, *options)
    assert len(found) >= REQUESTS
    assert set(found) == {1}


def test_periodic_concurrency_ends(server, tmp_path):
    export = tmp_path / "export.json"
    run([
        tool("perf_analyzer"), "-i", "grpc", "-u", server.address("grpc"), "-m", "decoupled", "--async", "--streaming",
        "--periodic-concurrency-range", "1:7:2", "--request-period", str(DECOUPLED_RESPONSES),
        "--profile-export-file", str(export),
    ])  # fmt: skip
    (experiment,) = json.loads(export.read_text(errors="replace"), strict=False)["experiments"]
    assert len(experiment["requests"]) == 7


@pytest.mark.parametrize("load", [["--concurrency-range", "2"], ["--request-rate-range", "40"]])
def test_streams_of_a_decoupled_model(server, tmp_path, load):
    found = responses(server, "grpc", tmp_path, "-m", "decoupled", "--streaming", *load)
    assert len(found) >= REQUESTS
    # perf_analyzer asks for an empty final response.
    assert set(found) == {DECOUPLED_RESPONSES + 1}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_server_counts_what_perf_analyzer_sends(server, tmp_path, protocol):
    before = server.gauge("nv_inference_request_success")
    sent = len(responses(server, protocol, tmp_path, "-m", "fixed"))
    # perf_analyzer may still send a request when it has its count.
    assert sent <= server.gauge("nv_inference_request_success") - before <= sent + 1
