"""Several engines of one model behind one name, in a real server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from eventually import wait_until
from server_process import ServerProcess

MODEL = "neso-pilot"
QUESTIONS = [f"What is in-flight batching, version {number}?" for number in range(12)]


def engines(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "neso.engine.ipc.engine_process" in child.cmdline()]


def answer(server: ServerProcess, question: str, max_tokens: int = 12) -> tuple[int, str]:
    body = {"text_input": question, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    status, reply = server.post(f"/v2/models/{MODEL}/generate", body)
    return status, reply.get("text_output", reply.get("error"))


def by_engine(server: ServerProcess, name: str) -> list[float]:
    samples = {key: value for key, value in server.metrics().items() if key.startswith(f"{name}{{")}
    numbers = range(len(engines(server)))
    return [value for number in numbers for key, value in samples.items() if f'engine="{number}"' in key]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(MODEL, "--data-parallel-size=2", "--engine-config=num_blocks=256") as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, str]]:
    with ServerProcess(MODEL, "--engine-config=num_blocks=256") as server:
        return [answer(server, question) for question in QUESTIONS]


def test_engines_have_their_own_cpus(server):
    first, second = (set(process.cpu_affinity()) for process in engines(server))
    assert first | second == os.sched_getaffinity(0)
    assert not first & second or len(os.sched_getaffinity(0)) == 1


def test_answers_equal_those_of_one_engine(server, expected):
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        assert list(pool.map(lambda question: answer(server, question), QUESTIONS)) == expected
    assert all(steps > 0 for steps in by_engine(server, "neso_engine_steps_total"))
    assert server.gauge("vllm:prompt_tokens_total") > 0
    wait_until(lambda: sum(by_engine(server, "neso_engine_requests")) == 0)


def test_common_prefix_stays_on_one_engine(server):
    prefix = "The following question is about inference servers. " * 12
    before = by_engine(server, "neso_engine_prefix_cache_queries_total")
    for number in range(6):
        assert answer(server, f"{prefix} Question {number}?")[0] == 200
    after = by_engine(server, "neso_engine_prefix_cache_queries_total")
    assert sum(new > old for new, old in zip(after, before, strict=True)) == 1


def test_other_engine_serves_while_one_is_restarted(server, expected):
    victim = engines(server)[0]
    restarts = server.gauge("neso_process_restarts_total")
    long = ThreadPoolExecutor(4).map(lambda question: answer(server, question, 400), QUESTIONS[:4])
    wait_until(lambda: min(by_engine(server, "neso_engine_requests")) > 0)
    victim.send_signal(signal.SIGKILL)
    replies = list(long)
    failed = [text for status, text in replies if status == 503]
    assert failed and all("SIGKILL" in text and "is being restarted" in text for text in failed)
    assert [status for status, _ in replies].count(200) == len(replies) - len(failed) > 0
    assert server.get("/v2/health/ready")[0] == 200
    assert [answer(server, question) for question in QUESTIONS[:2]] == expected[:2]
    wait_until(lambda: server.gauge("neso_process_restarts_total") == restarts + 1)
    assert by_engine(server, "neso_engine_up") == [1, 1]
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        assert list(pool.map(lambda question: answer(server, question), QUESTIONS)) == expected


@pytest.mark.parametrize("backend", ["llm", "tensorrtllm"])
def test_instance_group_sets_the_number_of_engines(tmp_path: Path, backend: str):
    name = "gpt_model_path" if backend == "tensorrtllm" else "model"
    folder = tmp_path / MODEL
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        f'backend: "{backend}" instance_group [ {{ count: 2 kind: KIND_CPU }} ]'
        f'parameters {{ key: "{name}" value {{ string_value: "neso-pilot" }} }}'
        'parameters { key: "num_blocks" value { string_value: "64" } }'
    )
    with ServerProcess("--model-repository", tmp_path) as server:
        assert len(engines(server)) == 2, server.output
        assert "2 engines of NativeRunner" in server.output


def test_wrong_number_of_cpu_sets_is_an_error():
    with ServerProcess(MODEL, "--data-parallel-size=2", "--cpus=0;0;0") as server:
        assert server.process.wait(60) == 1
        assert "cpus: 3 sets, separated by ';', for 2 engines" in server.output
