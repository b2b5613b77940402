"""A model on workers, in real processes: results, lost workers, workers that join."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_server import MODEL, ClusterServer, texts_of_one_engine
from eventually import wait_until
from free_port import free_port
from server_process import ServerProcess

pytestmark = pytest.mark.slow

PROMPTS = [f"What is in-flight batching, version {number}?" for number in range(6)]
LENGTH = 300
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.0, "seed": 7}


class Cluster(ClusterServer):
    """A server with two workers of its own, where others can join."""

    def __init__(self, directory: Path) -> None:
        self.token_file = directory / "token"
        self.token_file.write_text("a secret of the tests")
        self.address = f"tcp://127.0.0.1:{free_port()}"
        server = ServerProcess(
            MODEL,
            "--workers=2",
            f"--worker-address={self.address}",
            f"--worker-token-file={self.token_file}",
            "--engine-config=num_blocks=256",
            "--engine-config=heartbeat_timeout=6",
        )
        super().__init__(server, LENGTH)

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.server.process.pid).children()
        return [child for child in children if "neso.cluster.worker_process" in child.cmdline()]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    with cluster.server:
        yield cluster


@pytest.fixture(scope="module")
def expected() -> dict[str, list[str]]:
    return texts_of_one_engine(PROMPTS, LENGTH, {"greedy": GREEDY, "seeded": SEEDED})


@pytest.mark.parametrize("name, sampling", [("greedy", GREEDY), ("seeded", SEEDED)])
def test_texts_equal_those_of_one_engine(cluster: Cluster, expected, name: str, sampling: dict[str, Any]):
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(lambda prompt: cluster.stream(prompt, sampling), PROMPTS))
    assert texts == expected[name]
    assert cluster.count("workers") == 2


@pytest.mark.parametrize("number, sampling", [(signal.SIGKILL, GREEDY), (signal.SIGSTOP, SEEDED)])
def test_streams_continue_on_another_worker(
    cluster: Cluster, expected, number: int, sampling: dict[str, Any]
):
    wait_until(lambda: cluster.count("workers") == 2)
    retries, restarts = cluster.count("retries_total"), cluster.server.gauge("neso_process_restarts_total")
    victim = cluster.workers()[0]
    signalled: list[int] = []

    def lose_worker() -> None:
        if not signalled:
            signalled.append(victim.pid)
            victim.send_signal(number)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        texts = list(pool.map(lambda prompt: cluster.stream(prompt, sampling, lose_worker), PROMPTS))
    assert texts == expected["greedy" if sampling is GREEDY else "seeded"]
    wait_until(lambda: cluster.server.gauge("neso_process_restarts_total") > restarts)
    wait_until(lambda: cluster.count("workers") == 2)
    assert cluster.count("retries_total") > retries
    assert cluster.count("failed_requests_total") == 0
    assert victim.pid not in [worker.pid for worker in cluster.workers()]


def test_worker_of_another_host_joins_and_leaves(cluster: Cluster, tmp_path: Path):
    wait_until(lambda: cluster.count("workers") == 2)
    command = [sys.executable, "-m", "neso.cli", "worker", MODEL, f"--join={cluster.address}", "--name=guest"]
    command += [f"--token-file={cluster.token_file}", "--engine-config=num_blocks=256"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as guest:
        try:
            wait_until(lambda: cluster.count("workers") == 3 or guest.poll() is not None)
            assert guest.poll() is None, guest.stderr and guest.stderr.read()
            guest.send_signal(signal.SIGTERM)
            assert guest.wait(60) == 0
        finally:
            guest.kill()
    wait_until(lambda: cluster.count("workers") == 2)


def test_worker_with_another_model_is_refused(cluster: Cluster):
    command = [sys.executable, "-m", "neso.cli", "worker", MODEL, f"--join={cluster.address}"]
    command += [f"--token-file={cluster.token_file}", "--quantization=int8"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert result.returncode == 1
    assert "refuses this worker: it has another checkpoint, or other options" in result.stderr


def test_repeated_prompts_go_to_the_worker_that_holds_them(cluster: Cluster):
    """The server knows from the workers' reports which of them has computed a prompt, in any order of requests."""
    wait_until(lambda: cluster.count("workers") == 2)
    prompts = [f"{number}: " + "Workers report their blocks. " * 20 for number in range(5)]

    def run(prompt: str) -> None:
        cluster.client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)

    for prompt in prompts:
        run(prompt)
    assert cluster.server.gauge("neso_worker_prefix_blocks") >= 5
    queries, hits = (cluster.server.gauge(f"vllm:prefix_cache_{name}_total") for name in ("queries", "hits"))
    for prompt in prompts[::-1] * 2:
        run(prompt)
    queries = cluster.server.gauge("vllm:prefix_cache_queries_total") - queries
    assert cluster.server.gauge("vllm:prefix_cache_hits_total") - hits > 0.8 * queries


def test_cancelled_requests_are_aborted_in_the_worker(cluster: Cluster):
    stream = cluster.client.completions.create(
        model=MODEL, prompt="Tell a story", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    wait_until(lambda: cluster.server.gauge("vllm:num_requests_running") == 0)
    assert cluster.count("queued_requests") == 0


def test_workers_end_with_the_server(tmp_path: Path):
    with ServerProcess(MODEL, "--workers=1", "--engine-config=num_blocks=64") as server:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) >= 2
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(process.is_running() for process in processes))


@pytest.mark.parametrize(
    "options, message",
    [
        (("--workers=2", "--data-parallel-size=2"), "data_parallel_size cannot be combined with workers"),
        (("--worker-address=tcp://127.0.0.1:1",), "needs a file with a token"),
    ],
)
def test_options_that_do_not_fit_workers_are_errors(options: tuple[str, ...], message: str):
    with ServerProcess(MODEL, *options) as server:
        assert server.process.wait(60) == 1
        assert message in server.output
