"""Engine processes of a real server that die or hang: errors, readiness, liveness, metrics, and the restart."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from eventually import wait_until
from in_flight import LONG, MODEL, InFlight, answer, live, ready
from server_process import ServerProcess
from step_pace import slow_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def engine_of(server: ServerProcess) -> psutil.Process:
    wait_until(lambda: _engines(server))
    return _engines(server)[0]


def _engines(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "neso.engine.ipc.engine_process" in child.cmdline()]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    """Steps take 50 ms, so that long requests are in flight when their engine dies."""
    environment = slow_environment(tmp_path_factory.mktemp("slow"))
    with ServerProcess(
        "--engine-config=heartbeat_timeout=2", "--engine-config=max_restarts=50", environment=environment
    ) as process:
        assert process.ports, process.output
        yield process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
def test_engine_is_restarted(server, number):
    expected, pid = answer(server), engine_of(server).pid
    restarts = server.gauge("neso_process_restarts_total")
    tokens = server.gauge("vllm:generation_tokens_total")
    in_flight = InFlight(server)
    started = time.monotonic()
    engine_of(server).send_signal(number)
    errors = in_flight.join()
    detected = time.monotonic() - started
    reason = "did not respond for 2 s" if number == signal.SIGSTOP else number.name
    assert set(errors) == {"generate", "generate_stream", "grpc", "openai", "openai stream"}
    for protocol, error in errors.items():
        assert reason in error and "retry" in error, f"{protocol}: {error}"
    assert errors["generate"].startswith("503") and errors["openai"].startswith("503")
    wait_until(lambda: ready(server))
    print(
        f"{number.name}: requests failed after {detected:.2f} s, ready after {time.monotonic() - started:.2f} s"
    )
    assert answer(server) == expected and engine_of(server).pid != pid
    assert live(server)
    wait_until(lambda: server.gauge("vllm:num_requests_running") == 0)
    for gauge in ("vllm:num_requests_waiting", "nv_inference_pending_request_count"):
        assert server.gauge(gauge) == 0, gauge
    assert server.gauge("neso_process_restarts_total") == restarts + 1
    assert server.gauge("vllm:generation_tokens_total") > tokens, "statistics are kept"


def test_server_and_model_are_not_ready_during_a_restart(server):
    engine_of(server).kill()
    seen: list[tuple[bool, bool, int]] = []

    def restarted() -> bool:
        model = server.get(f"/v2/models/{MODEL}/ready")[0] == 200
        health = server.get("/health", "openai")[0]
        seen.append((ready(server), model, health))
        return seen[-1] == (True, True, 200) and any(not each[0] for each in seen)

    wait_until(restarted)
    assert (False, False, 503) in seen
    assert live(server)


def test_requests_during_a_restart_fail_at_once_and_succeed_later(server):
    engine_of(server).kill()
    wait_until(lambda: not ready(server))
    status, body = server.post(f"/v2/models/{MODEL}/generate", LONG)
    assert status == 503 and "is being restarted: retry" in body["error"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(
            server.url(f"/v2/models/{MODEL}/generate"), json.dumps(LONG).encode(), timeout=60
        )
    assert caught.value.code == 503 and caught.value.headers["retry-after"] == "1"
    wait_until(lambda: ready(server))
    assert answer(server)


def test_server_is_not_live_when_the_engine_fails_too_often(tmp_path):
    flags = ("--engine-config=max_restarts=2", "--engine-config=restart_window=600")
    with ServerProcess(*flags, environment=slow_environment(tmp_path)) as server:
        for _ in range(2):
            engine_of(server).kill()
            wait_until(lambda: not ready(server))
            assert live(server)
            wait_until(lambda: ready(server))
        in_flight = InFlight(server)
        engine_of(server).kill()
        errors = in_flight.join()
        assert errors and all("is not restarted" in error for error in errors.values()), errors
        wait_until(lambda: not live(server))
        assert not ready(server) and not _engines(server)
        assert server.get("/health/live", "openai")[0] == 503
        status, body = server.post(f"/v2/models/{MODEL}/generate", LONG)
        assert status == 503 and "is not restarted" in body["error"]
        assert re.search("failed too often", server.output)
        assert server.stop() == 0
