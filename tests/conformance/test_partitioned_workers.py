"""A worker in a network namespace of its own: a slow link to NATS, server and other workers, and one that is cut."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_server import MODEL, ClusterServer
from eventually import wait_until
from free_port import free_port
from server_process import ServerProcess
from shared_workers import Nats, needs_nats, worker

import neso

pytestmark = pytest.mark.slow

HOST, FAR_HOST = "10.213.71.1", "10.213.71.2"
LENGTH = 300
PROMPT = "What is in-flight batching?"


class Link:
    """A link between this namespace (`HOST`) and a new one."""

    def __init__(self) -> None:
        name = secrets.token_hex(3)
        self.namespace, self._here, self._there = f"neso-{name}", f"nh{name}", f"nt{name}"
        self.prefix = ("ip", "netns", "exec", self.namespace)
        run("ip", "netns", "add", self.namespace)
        run(
            "ip",
            "link",
            "add",
            self._here,
            "type",
            "veth",
            "peer",
            "name",
            self._there,
            "netns",
            self.namespace,
        )
        run("ip", "addr", "add", f"{HOST}/24", "dev", self._here)
        run("ip", "link", "set", self._here, "up")
        run(*self.prefix, "ip", "addr", "add", f"{FAR_HOST}/24", "dev", self._there)
        run(*self.prefix, "ip", "link", "set", self._there, "up")
        run(*self.prefix, "ip", "link", "set", "lo", "up")

    def slow(self) -> None:
        """Limit the rate of both directions."""
        rate = ("root", "tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms")
        run("tc", "qdisc", "add", "dev", self._here, *rate)
        run(*self.prefix, "tc", "qdisc", "add", "dev", self._there, *rate)

    def cut(self) -> None:
        run(*self.prefix, "ip", "link", "set", self._there, "down")

    def mend(self) -> None:
        run(*self.prefix, "ip", "link", "set", self._there, "up")

    def remove(self) -> None:
        subprocess.run(["ip", "netns", "del", self.namespace], check=False)


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def link() -> Iterator[Link]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs iproute2")
    try:
        link = Link()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted: {error.stderr.decode().strip()}")
    try:
        yield link
    finally:
        link.remove()


@needs_nats
def test_worker_behind_a_slow_link_that_is_cut(link: Link, tmp_path: Path):
    llm = neso.LLM(MODEL, num_blocks=256)
    params = neso.SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.0)
    expected = llm.generate([PROMPT], params, progress=False)[0].outputs[0].text
    link.slow()
    with ExitStack() as started:
        nats = Nats(tmp_path, host=HOST)
        started.callback(lambda: nats.process.end())
        far = worker(nats.url, "far", prefix=link.prefix)
        started.callback(far.end)
        server = ServerProcess(MODEL, f"--worker-address={nats.url}", "--engine-config=heartbeat_timeout=6")
        cluster = ClusterServer(started.enter_context(server), LENGTH)
        assert cluster.stream(PROMPT, {"temperature": 0.0}) == expected

        near = worker(nats.url, "near")
        started.callback(near.end)

        def cut() -> None:
            # The request runs on the far worker, unless the near one was ready at once.
            wait_until(lambda: cluster.count("workers") == 2)
            link.cut()

        assert cluster.stream(PROMPT, {"temperature": 0.0}, cut) == expected
        wait_until(lambda: cluster.count("workers") == 1)
        link.mend()
        wait_until(lambda: cluster.count("workers") == 2)
        assert cluster.stream(PROMPT, {"temperature": 0.0}) == expected
        assert cluster.count("failed_requests_total") == 0


def test_prefill_worker_behind_a_slow_link_that_is_cut(link: Link, tmp_path: Path):
    """Without NATS. Blocks go over the link; the decode worker computes what it has not got when the link is cut."""
    sampling = {"temperature": 1.0, "seed": 7}
    prompts = [f"{number}. " + "Servers have queues, workers pull. " * 24 for number in range(4)]
    params = neso.SamplingParams(max_tokens=60, ignore_eos=True, **sampling)
    llm = neso.LLM(MODEL, num_blocks=256)
    expected = [result.outputs[0].text for result in llm.generate(prompts, params, progress=False)]
    link.slow()
    address, token = f"tcp://{HOST}:{free_port()}", tmp_path / "token"
    token.write_text("a secret of the tests")
    server = ServerProcess(
        MODEL,
        "--decode-workers=1",
        "--min-remote-prefill=64",
        f"--worker-address={address}",
        f"--worker-token-file={token}",
        "--engine-config=num_blocks=256",
        "--engine-config=heartbeat_timeout=6",
    )
    with ExitStack() as started:
        cluster = ClusterServer(started.enter_context(server), 60)
        options = ("--roles=prefill", f"--token-file={token}", f"--engine-config=kv_transfer_host={FAR_HOST}")
        far = worker(address, "far", *options, prefix=link.prefix)
        started.callback(far.end)
        wait_until(lambda: cluster.count("workers") == 2)

        assert cluster.stream(prompts[0], sampling) == expected[0]
        imported = server.gauge("neso_kv_transfer_bytes_total")
        assert imported > 0 and server.gauge("neso_kv_transfer_imports_total") == 1

        with ThreadPoolExecutor(len(prompts)) as pool:
            texts = pool.map(lambda prompt: cluster.stream(prompt, sampling), prompts[1:])
            wait_until(lambda: server.gauge("neso_kv_transfer_bytes_total") > imported)
            link.cut()
            assert list(texts) == expected[1:]
        wait_until(lambda: cluster.count("workers") == 1)
        assert cluster.stream(prompts[1], sampling) == expected[1]
        link.mend()
        wait_until(lambda: cluster.count("workers") == 2)
        assert cluster.stream("Again. " + prompts[0], sampling)
        assert cluster.count("failed_requests_total") == 0
        gauges = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "neso_worker_exported_prompts")
        wait_until(lambda: not any(server.gauge(name) for name in gauges))
