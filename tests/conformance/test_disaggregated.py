"""Prefill and decode on different workers, in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster_server import MODEL, ClusterServer
from eventually import wait_until
from server_process import ServerProcess

import neso

pytestmark = pytest.mark.slow

LENGTH = 150
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.0, "seed": 7}


def prompts(topic: str) -> list[str]:
    """Return long prompts whose beginnings differ, so that no worker has a part of them in its cache."""
    return [
        f"{number} {topic}. " + "Servers have queues, and workers pull from them. " * 30
        for number in range(4)
    ]


class Cluster(ClusterServer):
    def __init__(self, *options: str) -> None:
        server = ServerProcess(
            MODEL, *options, "--engine-config=num_blocks=512", "--engine-config=heartbeat_timeout=6"
        )
        super().__init__(server, LENGTH)
        self.llm = neso.LLM(MODEL, num_blocks=512)

    def texts(self, prompts: list[str], sampling: dict[str, Any]) -> list[str]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.stream(prompt, sampling), prompts))

    def expected(self, prompts: list[str], sampling: dict[str, Any]) -> list[str]:
        params = neso.SamplingParams(max_tokens=LENGTH, ignore_eos=True, **sampling)
        return [result.outputs[0].text for result in self.llm.generate(prompts, params, progress=False)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster("--prefill-workers=1", "--decode-workers=2", "--min-remote-prefill=64")
    with cluster.server:
        yield cluster


@pytest.mark.parametrize("topic, sampling", [("greedy", GREEDY), ("seeded", SEEDED)])
def test_texts_equal_those_of_one_engine(cluster: Cluster, topic: str, sampling: dict[str, Any]):
    before, imported = cluster.count("remote_prefills_total"), cluster.count("imported_tokens_total")
    assert cluster.texts(prompts(topic), sampling) == cluster.expected(prompts(topic), sampling)
    assert cluster.count("remote_prefills_total") >= before + 4
    assert cluster.count("imported_tokens_total") > imported
    assert cluster.server.gauge("neso_worker_exported_prompts") == 0


def test_several_outputs_of_a_transferred_prompt(cluster: Cluster):
    before = cluster.count("remote_prefills_total")
    prompt = prompts("several")[0]
    reply = cluster.client.completions.create(
        model=MODEL, prompt=prompt, n=2, max_tokens=20, extra_body={"ignore_eos": True}, **SEEDED
    )
    params = neso.SamplingParams(max_tokens=20, ignore_eos=True, n=2, **SEEDED)
    (expected,) = cluster.llm.generate([prompt], params, progress=False)
    assert [choice.text for choice in reply.choices] == [output.text for output in expected.outputs]
    assert cluster.count("remote_prefills_total") > before


def test_short_prompt_stays_on_the_decode_worker(cluster: Cluster):
    before = cluster.count("remote_prefills_total")
    cluster.stream("What is TTFT?", GREEDY)
    assert cluster.count("remote_prefills_total") == before


def test_cache_accounting_is_intact_afterwards(cluster: Cluster):
    wait_until(lambda: cluster.server.gauge("vllm:num_requests_running") == 0)
    wait_until(lambda: cluster.server.gauge("vllm:kv_cache_usage_perc") == 0)


def test_prefill_workers_alone_are_refused():
    with ServerProcess(MODEL, "--prefill-workers=1") as server:
        assert server.process.wait(60) == 1
        assert "prefill_workers need decode_workers" in server.output
