"""A worker in a network namespace of its own: a slow link to NATS and the server, and one that is cut."""

from __future__ import annotations

import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster_server import MODEL, ClusterServer
from eventually import wait_until
from server_process import ServerProcess
from shared_workers import Nats, needs_nats, worker

import neso

pytestmark = [pytest.mark.slow, needs_nats]

HOST = "10.213.71.1"
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
        run(*self.prefix, "ip", "addr", "add", "10.213.71.2/24", "dev", self._there)
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
