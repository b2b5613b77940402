"""Engine processes of the backend `vllm` that die or hang, with real vLLM (CPU build)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest
from eventually import wait_until
from server_process import ServerProcess
from vllm_environment import ENVIRONMENT, PYTHON, require_vllm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL, OTHER = "vllm_model", "other_model"
PATH = f"/v2/models/{MODEL}/generate"
SHORT = {"text_input": "What is paged attention?", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
LONG = {**SHORT, "max_tokens": 480}
RESTART_SECONDS = 600.0  # vLLM starts slowly on a loaded machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    require_vllm()
    repository = tmp_path_factory.mktemp("repository")
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "gpu_memory_utilization": 0.5}
    supervision = {"max_restarts": 2, "restart_window": 3600, "step_timeout": 20}
    for name in (MODEL, OTHER):  # their engines are started at the same time
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text('backend: "vllm"')
        (repository / name / "1" / "model.json").write_text(
            json.dumps({"model": "neso-pilot", **options, **supervision})
        )
    with ServerProcess(
        f"--model-repository={repository}", python=PYTHON, environment=ENVIRONMENT, timeout=RESTART_SECONDS
    ) as process:
        assert process.ports, process.output
        yield process


def engines(server: ServerProcess) -> list[list[psutil.Process]]:
    """Return the processes of vLLM's two engines, each with its workers."""
    trees = [
        [child, *child.children(recursive=True)] for child in psutil.Process(server.process.pid).children()
    ]
    return sorted(trees, key=lambda tree: max(process.memory_info().rss for process in tree))[-2:]


def engine_of(server: ServerProcess) -> list[psutil.Process]:
    """Return the processes of `MODEL`'s engine, which compute while the model serves a request."""

    def used(tree: list[psutil.Process]) -> float:
        return sum(process.cpu_times().user for process in tree)

    before = [(tree, used(tree)) for tree in engines(server)]
    status, body = server.post(PATH, LONG)
    assert status == 200, body
    return max(before, key=lambda each: used(each[0]) - each[1])[0]


def largest(tree: list[psutil.Process]) -> psutil.Process:
    """Return the process that holds the model."""
    return max(tree, key=lambda process: process.memory_info().rss)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ready(server: ServerProcess) -> bool:
    return server.get("/v2/health/ready")[0] == 200


def answer(server: ServerProcess) -> str:
    status, body = server.post(PATH, SHORT)
    assert status == 200, body
    return body["text_output"]


def fail_in_flight(server: ServerProcess, number: signal.Signals) -> list[tuple[int, dict[str, str]]]:
    """Send a signal to `MODEL`'s engine while three requests are in flight; return their answers."""
    engine = largest(engine_of(server))
    answers: list[tuple[int, dict[str, str]]] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            answers.append(server.post(PATH, LONG))
            if answers[-1][0] != 200:
                return

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: answers, 120)  # under load: the first requests are complete
    os.kill(engine.pid, number)
    wait_until(lambda: not ready(server), 120)
    stop.set()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a request got no response"
    return [each for each in answers if each[0] != 200]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_engine_is_restarted_under_load(server: ServerProcess, number: signal.Signals) -> None:
    expected, engine = answer(server), engine_of(server)
    (other,) = [tree for tree in engines(server) if tree != engine]
    restarts = server.gauge("neso_process_restarts_total")
    failed = fail_in_flight(server, number)
    assert failed and {status for status, _ in failed} == {503}, failed
    assert server.get("/v2/health/live")[0] == 200
    wait_until(lambda: ready(server), RESTART_SECONDS)
    assert answer(server) == expected
    assert other in engines(server)  # only the failed engine is replaced, with its workers
    assert not any(alive(process) for process in engine)
    assert server.gauge("neso_process_restarts_total") == restarts + 1
    assert ("did not answer for 20 s (step_timeout)" in server.output) == (number == signal.SIGSTOP)


def test_server_is_not_live_after_more_failures_than_the_limit(server: ServerProcess) -> None:
    largest(engine_of(server)).kill()  # for the third time
    wait_until(lambda: server.get("/v2/health/live")[0] != 200, 120)
    assert not ready(server)
    wait_until(lambda: "has failed too often and is not restarted" in server.output)
    status, body = server.post(PATH, SHORT)
    assert status == 503, body
