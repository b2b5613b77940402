"""Servers that share workers through NATS JetStream, in real processes: results, and every part that can be lost."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cluster_server import MODEL, ClusterServer, texts_of_one_engine
from eventually import wait_until
from server_process import ServerProcess
from shared_workers import Nats, Process, needs_nats, status, worker
from step_pace import slow_children

pytestmark = [pytest.mark.slow, needs_nats]

PROMPTS = [f"What is in-flight batching, version {number}?" for number in range(6)]
LENGTH = 300
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.0, "seed": 7}


def server(url: str, *options: str) -> ServerProcess:
    return ServerProcess(MODEL, f"--worker-address={url}", "--engine-config=heartbeat_timeout=6", *options)


class Cluster:
    """Two servers and two workers."""

    def __init__(self, directory: Path, started: ExitStack) -> None:
        self.nats = Nats(directory)
        started.callback(lambda: self.nats.process.end())
        self._started = started
        self.workers = {name: self.worker(name) for name in ("one", "two")}
        self.servers = [self.server(), self.server()]

    def worker(self, name: str) -> Process:
        process = worker(self.nats.url, name)
        self._started.callback(process.end)
        return process

    def server(self) -> ClusterServer:
        return ClusterServer(self._started.enter_context(server(self.nats.url)), LENGTH)

    def count(self, name: str) -> float:
        return sum(server.count(name) for server in self.servers)

    def texts(self, sampling: dict[str, Any], during: Callable[[], None] | None = None) -> list[str]:
        """Return the texts of all prompts, half of them from each server. `during` is called once meanwhile."""
        called: list[bool] = []

        def once() -> None:
            if during is not None and not called:
                called.append(True)
                during()

        def stream(number: int) -> str:
            return self.servers[number % 2].stream(PROMPTS[number], sampling, once)

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(stream, range(len(PROMPTS))))

    def complete(self) -> None:
        """Wait until both servers know both workers."""
        wait_until(lambda: all(server.count("workers") == 2 for server in self.servers))

    def idle(self) -> bool:
        """Whether nothing runs anywhere: in the servers, the workers and the queue."""
        running = sum(server.server.gauge("vllm:num_requests_running") for server in self.servers)
        return running == 0 and f"queue '{MODEL}': 0 requests" in status(self.nats.url).stdout


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as started:
        cluster = Cluster(tmp_path_factory.mktemp("nats"), started)
        yield cluster


@pytest.fixture(scope="module")
def expected() -> dict[str, list[str]]:
    return texts_of_one_engine(PROMPTS, LENGTH, {"greedy": GREEDY, "seeded": SEEDED})


@pytest.mark.parametrize("name, sampling", [("greedy", GREEDY), ("seeded", SEEDED)])
def test_two_servers_share_the_workers(cluster: Cluster, expected, name: str, sampling: dict[str, Any]):
    cluster.complete()
    assert cluster.texts(sampling) == expected[name]
    assert all(server.count("grants_total") >= 3 for server in cluster.servers)
    wait_until(cluster.idle)


def test_status_shows_servers_and_workers(cluster: Cluster):
    cluster.complete()
    shown = status(cluster.nats.url).stdout
    assert sum(line.startswith("│ server") for line in shown.splitlines()) == 2, shown
    assert sum(line.startswith("│ worker") for line in shown.splitlines()) == 2, shown
    assert "decode+prefill" in shown


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_continue_on_another_worker(cluster: Cluster, expected, number: signal.Signals):
    cluster.complete()
    retries = cluster.count("retries_total")
    victim = cluster.workers["one"]
    assert cluster.texts(SEEDED, lambda: victim.send(number)) == expected["seeded"]
    assert cluster.count("retries_total") > retries
    assert cluster.count("failed_requests_total") == 0
    if number is signal.SIGKILL:
        victim.end()
        cluster.workers["one"] = cluster.worker("one")
    else:
        victim.send(signal.SIGCONT)
    cluster.complete()
    wait_until(cluster.idle)


def test_streams_survive_a_restart_of_nats(cluster: Cluster, expected):
    cluster.complete()

    def restart() -> None:
        cluster.nats.process.end()
        cluster.nats.start()

    assert cluster.texts(GREEDY, restart) == expected["greedy"]
    assert cluster.count("failed_requests_total") == 0
    cluster.complete()
    assert cluster.texts(SEEDED) == expected["seeded"]
    wait_until(cluster.idle)


def test_requests_of_a_killed_server_are_aborted(cluster: Cluster, expected):
    cluster.complete()
    other = cluster.server()
    stream = other.client.completions.create(
        model=MODEL, prompt="Tell a story", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    other.server.process.kill()
    assert cluster.texts(GREEDY) == expected["greedy"]
    wait_until(cluster.idle)
    cluster.complete()


def test_worker_with_another_model_is_refused(cluster: Cluster):
    other = worker(cluster.nats.url, "other", "--quantization=int8")
    assert other.process.wait(90) == 1
    other.end()
    assert f"the queue '{MODEL}' at {cluster.nats.url} is used for another checkpoint" in other.output


def test_full_queue_rejects_requests(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    slow_children(monkeypatch, tmp_path)  # the first request must run when the second one arrives
    options = ("--engine-config=nats_queue=small", "--engine-config=nats_max_requests=1")
    one = worker(cluster.nats.url, "small", "--engine-config=nats_queue=small")
    try:
        with server(cluster.nats.url, *options) as small:
            body = {"model": MODEL, "prompt": "Tell a story", "max_tokens": 2, "ignore_eos": True}
            wait_until(lambda: small.post("/v1/completions", body, "openai")[0] == 200)
            client = ClusterServer(small, LENGTH).client
            running = client.completions.create(
                model=MODEL, prompt="a", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(running))
            code, reply = small.post("/v1/completions", body, "openai")
            assert (code, "nats_max_requests is 1" in str(reply)) == (429, True), reply
            running.close()
            wait_until(lambda: small.post("/v1/completions", body, "openai")[0] == 200)
    finally:
        one.end()


def test_prefill_and_decode_apart(cluster: Cluster, expected):
    queue = "--engine-config=nats_queue=apart"
    workers = [
        worker(cluster.nats.url, f"apart-{role}", queue, f"--roles={role}") for role in ("prefill", "decode")
    ]
    try:
        with server(cluster.nats.url, queue, "--min-remote-prefill=1") as apart:
            client = ClusterServer(apart, LENGTH)
            wait_until(lambda: client.count("workers") == 2)
            assert client.stream(PROMPTS[0] * 10, GREEDY)
            assert client.stream(PROMPTS[0], GREEDY) == expected["greedy"][0]
            assert client.count("remote_prefills_total") >= 1
            assert client.count("imported_tokens_total") > 0
    finally:
        for one in workers:
            one.end()


def test_password_is_needed_and_not_logged(tmp_path: Path):
    nats = Nats(tmp_path, "--user=neso", "--pass=a-secret")
    url = nats.url.replace("//", "//neso:{}@")
    try:
        refused = status(url.format("wrong-secret"))
        assert refused.returncode == 1
        assert "Authorization" in refused.stderr and "secret" not in refused.stderr
        assert "there is no queue" in status(url.format("a-secret")).stderr
        token = tmp_path / "token"
        token.write_text("another-secret")
        assert "Authorization" in status(nats.url, "--token-file", str(token)).stderr
    finally:
        nats.process.end()


@pytest.mark.parametrize(
    "options, message",
    [
        (("--worker-address=nats://127.0.0.1:1",), "cannot connect to NATS at nats://127.0.0.1:1"),
        (
            ("--worker-address=nats://x", "--engine-config=ttft_target=1", "--engine-config=itl_target=1"),
            "is not supported with workers that servers share",
        ),
        (("--worker-address=nats://x", "--engine-config=nats_queue=a.b"), "nats_queue must consist of"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: tuple[str, ...], message: str):
    with ServerProcess(MODEL, *options) as refused:
        assert refused.process.wait(60) == 1
        assert message in refused.output
