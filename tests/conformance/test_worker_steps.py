"""Processes that are killed or stopped, and requests that are cancelled, at exact steps of the protocol."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from cluster_server import MODEL, ClusterServer
from eventually import wait_until
from protocol_stops import Stops, stopping_environment
from server_process import ServerProcess
from shared_workers import Nats, needs_nats

import neso

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LENGTH = 30
SAMPLINGS = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.7, "seed": 11}]
OPTIONS = {
    "num_blocks": 256,
    "num_threads": 1,
    "max_prefill_chunk": 32,
    "heartbeat_timeout": 4,
    "max_attempts": 30,
    "max_restarts": 1000,
    "restart_window": 1,  # restarts without a delay
}
KILL, STOP = signal.SIGKILL, signal.SIGSTOP


class Cluster(ClusterServer):
    def __init__(self, folder: Path, *options: str, **engine: object) -> None:
        self.stops = Stops(folder)
        given = [f"--engine-config={name}={value}" for name, value in {**OPTIONS, **engine}.items()]
        server = ServerProcess(MODEL, *options, *given, environment=stopping_environment(folder))
        super().__init__(server, LENGTH)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.server.process.pid).children(recursive=True)

    def process(self, name: str, holder: int) -> psutil.Process:
        """Return the process that holds, its engine, or a worker. Raises `psutil.NoSuchProcess`."""
        if name == "holder":
            return psutil.Process(holder)
        if name == "engine":
            found = psutil.Process(holder).children()
        else:
            children = psutil.Process(self.server.process.pid).children()
            found = [child for child in children if f'"name":"{name}"' in child.cmdline()[-1]]
        if not found:
            raise psutil.NoSuchProcess(holder)
        return found[0]

    def texts(self, prompts: list[str]) -> list[str]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.stream, prompts, SAMPLINGS))

    @contextmanager
    def held_at(self, step: str, prompts: list[str]) -> Iterator[tuple[int, Future[list[str]]]]:
        """Send requests, and let the first process at a step hold until the end of the block.

        Yields its id and the texts.
        """
        self.stops.want(step)
        with ThreadPoolExecutor(1) as pool:
            texts = pool.submit(self.texts, prompts)
            try:
                yield self.stops.reached(step), texts
            finally:
                self.stops.go_on(step)

    def complete(self, workers: int = 3) -> None:
        wait_until(lambda: self.count("workers") == workers, 120)

    def assert_nothing_left(self) -> None:
        """Check that no request and no block of one is left anywhere."""
        gauges = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "neso_worker_exported_prompts")
        wait_until(lambda: not any(self.server.gauge(name) for name in gauges), 120)
        assert self.count("queued_requests") == 0
        assert self.count("failed_requests_total") == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("stops")
    cluster = Cluster(folder, "--prefill-workers=1", "--decode-workers=2", "--min-remote-prefill=64")
    with cluster.server:
        yield cluster


@pytest.fixture(scope="module")
def llm() -> neso.LLM:
    return neso.LLM(MODEL, num_blocks=256)


def prompts(topic: str) -> list[str]:
    """Return long prompts whose beginnings differ, so that no worker has a part of them in its cache."""
    return [f"{number} {topic}. " + "Servers have queues, workers pull. " * 20 for number in range(3)]


def texts_of_one_engine(llm: neso.LLM, prompts: list[str]) -> list[str]:
    params = [neso.SamplingParams(max_tokens=LENGTH, ignore_eos=True, **one) for one in SAMPLINGS]
    return [result.outputs[0].text for result in llm.generate(prompts, params, progress=False)]


# The step at which a process holds, and the process that is lost: the one that holds, its engine, or a worker.
LOSSES = [
    ("grant-prefill", "holder", KILL),
    ("grant-prefill", "holder", STOP),
    ("grant-decode", "holder", KILL),
    ("grant-decode", "engine", STOP),
    ("chunk", "holder", KILL),
    ("chunk", "prefill-0", STOP),
    ("chunk", "decode-1", KILL),
    ("prefilled", "prefill-0", KILL),
    ("pull", "prefill-0", KILL),
    ("pull", "holder", STOP),
    ("copied", "prefill-0", STOP),
    ("copied", "holder", KILL),
    ("imported", "prefill-0", KILL),
    ("imported", "holder", KILL),
    ("token", "engine", KILL),
    ("token", "holder", STOP),
    ("last-token", "holder", KILL),
    ("acknowledge", "decode-2", KILL),
]


@pytest.mark.parametrize("step, victim, number", LOSSES, ids=lambda value: getattr(value, "name", value))
def test_requests_survive_a_process_that_is_lost(
    cluster: Cluster, llm: neso.LLM, step: str, victim: str, number: signal.Signals
):
    cluster.complete()
    lost = cluster.count("lost_workers_total")
    wanted = prompts(f"{step} {victim} {number.name}")
    # On a busy machine, a worker that holds may already be lost because it is silent.
    with cluster.held_at(step, wanted) as (holder, texts), suppress(psutil.NoSuchProcess):
        cluster.process(victim, holder).send_signal(number)
    assert texts.result() == texts_of_one_engine(llm, wanted)
    wait_until(lambda: cluster.count("lost_workers_total") > lost)
    cluster.complete()
    cluster.assert_nothing_left()


@pytest.mark.parametrize(
    "step, seconds", [("put", 1), ("granted", 8), ("token", 1), ("acknowledge", 1)], ids=str
)
def test_requests_survive_a_server_that_stops_for_a_while(
    cluster: Cluster, llm: neso.LLM, step: str, seconds: float
):
    """After 8 s the workers have given the server up, and join again."""
    cluster.complete()
    wanted = prompts(f"server {step}")
    server = psutil.Process(cluster.server.process.pid)
    with cluster.held_at(step, wanted) as (_, texts):
        try:
            server.send_signal(STOP)
            time.sleep(seconds)
        finally:
            server.send_signal(signal.SIGCONT)
    assert texts.result() == texts_of_one_engine(llm, wanted)
    cluster.complete()
    cluster.assert_nothing_left()


STEPS = [
    "put",
    "granted",
    "grant-prefill",
    "grant-decode",
    "chunk",
    "prefilled",
    "pull",
    "copied",
    "imported",
]
STEPS += ["token", "last-token", "acknowledge"]


@pytest.mark.parametrize("step", STEPS)
def test_request_is_cancelled_at_a_step(cluster: Cluster, llm: neso.LLM, step: str):
    cluster.complete()
    cancelled, *others = prompts(f"cancel {step}")
    body = {"model": MODEL, "prompt": cancelled, "max_tokens": LENGTH, "stream": True, "ignore_eos": True}
    cluster.stops.want(step)
    client = http.client.HTTPConnection(cluster.server.address("openai"))
    try:
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        cluster.stops.reached(step)
    finally:
        client.close()
        cluster.stops.go_on(step)
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(cluster.stream, others, SAMPLINGS[1:]))
    assert texts == texts_of_one_engine(llm, prompts(f"cancel {step}"))[1:]
    cluster.assert_nothing_left()


def test_nothing_is_left_of_a_killed_server(cluster: Cluster):
    """The last test of this server: it is killed while blocks are transferred."""
    cluster.complete()
    processes = cluster.processes()
    cluster.stops.want("copied")
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(cluster.texts, prompts("killed server"))
        cluster.stops.reached("copied")
        maps = [one.path for process in processes for one in process.memory_maps()]
        os.kill(cluster.server.process.pid, KILL)
        cluster.stops.go_on("copied")
        with pytest.raises(Exception, match=r"incomplete chunked read|disconnected|Connection error"):
            texts.result()
    wait_until(lambda: not any(process.is_running() for process in processes))
    # Shared memory has no names, so the system has freed it.
    assert any("memfd:neso-kv-cache" in path for path in maps)
    assert not any(path.startswith("/dev/shm/") for path in maps)


def test_request_fails_with_a_clear_error_after_its_last_attempt(tmp_path: Path):
    cluster = Cluster(tmp_path, "--workers=1", max_attempts=2, heartbeat_timeout=60)
    with cluster.server:
        body = {"model": MODEL, "prompt": "Tell a story", "max_tokens": LENGTH, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            for attempt in range(2):
                cluster.stops.want("token")
                if attempt == 0:
                    answer = pool.submit(cluster.server.post, "/v1/completions", body, "openai")
                os.kill(cluster.stops.reached("token"), KILL)
            status, reply = answer.result()
        assert (status, "has lost 2 workers" in str(reply)) == (500, True), reply
        assert cluster.count("failed_requests_total") == 1
        wait_until(lambda: cluster.count("workers") == 1)
        assert cluster.server.post("/v1/completions", body, "openai")[0] == 200


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nats]:
    nats = Nats(tmp_path_factory.mktemp("nats"))
    yield nats
    nats.process.end()


@pytest.fixture(scope="module")
def nats_cluster(nats: Nats, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A server whose two workers pull tickets from NATS."""
    cluster = Cluster(tmp_path_factory.mktemp("tickets"), "--workers=2", f"--worker-address={nats.url}")
    with cluster.server:
        yield cluster


@needs_nats
@pytest.mark.parametrize(
    "step, victim, number",
    [
        ("claim", "holder", KILL),
        ("claim", "holder", STOP),
        ("claim", "nats", KILL),
        ("ticket-ack", "worker", KILL),
        ("ticket-ack", "nats", KILL),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_tickets_survive_a_process_that_is_lost(
    nats_cluster: Cluster, nats: Nats, llm: neso.LLM, step: str, victim: str, number: signal.Signals
):
    """nats-server is started again while the step waits."""
    cluster = nats_cluster
    cluster.complete(2)
    wanted = prompts(f"{step} {victim} {number.name}")
    with cluster.held_at(step, wanted) as (holder, texts):
        if victim == "nats":
            nats.process.end(number)
            nats.start()
        elif victim == "worker":
            psutil.Process(cluster.server.process.pid).children()[0].send_signal(number)
        else:
            cluster.process(victim, holder).send_signal(number)
    assert texts.result() == texts_of_one_engine(llm, wanted)
    cluster.complete(2)
    cluster.assert_nothing_left()
