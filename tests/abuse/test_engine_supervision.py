"""Engine processes of a real server that die or hang: errors, readiness, liveness, metrics, and the restart."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import openai
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from eventually import wait_until
from server_process import ServerProcess
from step_pace import slow_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "neso-pilot"
QUESTION = "What is paged attention?"
LONG = {"text_input": QUESTION, "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


def engine_of(server: ServerProcess) -> psutil.Process:
    wait_until(lambda: _engines(server))
    return _engines(server)[0]


def _engines(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "neso.engine.ipc.engine_process" in child.cmdline()]


def ready(server: ServerProcess) -> bool:
    return server.get("/v2/health/ready")[0] == 200


def live(server: ServerProcess) -> bool:
    return server.get("/v2/health/live")[0] == 200


def answer(server: ServerProcess) -> str:
    status, body = server.post(
        f"/v2/models/{MODEL}/generate", {"text_input": QUESTION, "max_tokens": 12, "temperature": 0}
    )
    assert status == 200, body
    return body["text_output"]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    """Steps take 50 ms, so that long requests are in flight when their engine dies."""
    environment = slow_environment(tmp_path_factory.mktemp("slow"))
    with ServerProcess(
        "--engine-config=heartbeat_timeout=2", "--engine-config=max_restarts=50", environment=environment
    ) as process:
        assert process.ports, process.output
        yield process


class InFlight:
    """One long request by each protocol, in threads. `errors` maps the protocol to the error that it ended with."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self.errors: dict[str, str] = {}
        works = (self._generate, self._stream, self._grpc, self._openai, self._openai_stream)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self.errors or server.gauge("vllm:num_requests_running") == len(works))
        assert not self.errors

    def join(self) -> dict[str, str]:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive(), f"a request got no response: {self.errors}"
        return self.errors

    def _generate(self) -> None:
        status, body = self._server.post(f"/v2/models/{MODEL}/generate", LONG)
        self.errors["generate"] = f"{status} {body['error']}"

    def _stream(self) -> None:
        request = urllib.request.Request(
            self._server.url(f"/v2/models/{MODEL}/generate_stream"),
            json.dumps({**LONG, "stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            events = [json.loads(line[6:]) for line in response if line.startswith(b"data: ")]
        assert len(events) > 1 and all("text_output" in event for event in events[:-1])
        self.errors["generate_stream"] = events[-1]["error"]

    def _grpc(self) -> None:
        request = service_pb2.ModelInferRequest(model_name=MODEL)
        request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            QUESTION.encode()
        )
        request.parameters["max_tokens"].int64_param = 1000
        request.parameters["ignore_eos"].bool_param = True
        with grpc.insecure_channel(self._server.address("grpc")) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            (*_, last) = stub.ModelStreamInfer(iter([request]), timeout=60)
            self.errors["grpc"] = last.error_message

    def _client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self._server.url("/v1", "openai"), api_key="none", max_retries=0)

    def _openai(self) -> None:
        with self._client() as client:
            try:
                client.completions.create(
                    model=MODEL, prompt=QUESTION, max_tokens=1000, extra_body={"ignore_eos": True}
                )
            except openai.APIStatusError as error:
                self.errors["openai"] = f"{error.status_code} {error.message}"

    def _openai_stream(self) -> None:
        chunks = 0
        with self._client() as client:
            try:
                for _ in client.completions.create(
                    model=MODEL,
                    prompt=QUESTION,
                    max_tokens=1000,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    chunks += 1
            except openai.APIError as error:
                assert chunks
                self.errors["openai stream"] = error.message


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
    wait_until(lambda: ready(server))
    assert answer(server)


def test_server_is_not_live_when_the_engine_fails_too_often(tmp_path):
    flags = ("--engine-config=max_restarts=2", "--engine-config=restart_window=600")
    with ServerProcess(*flags) as server:
        for _ in range(2):
            engine_of(server).kill()
            wait_until(lambda: not ready(server))
            assert live(server)
            wait_until(lambda: ready(server))
        engine_of(server).kill()
        wait_until(lambda: not live(server))
        assert not ready(server) and not _engines(server)
        assert server.get("/health/live", "openai")[0] == 503
        status, body = server.post(f"/v2/models/{MODEL}/generate", LONG)
        assert status == 503 and "is not restarted" in body["error"]
        assert re.search("failed too often", server.output)
        assert server.stop() == 0
