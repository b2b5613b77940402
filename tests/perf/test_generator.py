"""The load generator with its worker processes, on a real server process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from eventually import until
from stub import StubRequest, stream, stub_server
from stub_process import StubProcess, stub_process

from neso.perf.client.generator import LoadGenerator, default_workers
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.inputs.options import InputOptions
from neso.perf.load.options import LoadOptions
from neso.perf.load.plan import Arrival, LoadPlan
from neso.perf.output_options import OutputOptions
from neso.perf.profile import open_generator
from neso.perf.records import RunResult
from neso.perf.requests import PerfRequest

REQUESTS = [PerfRequest(f"prompt {i}", max_tokens=4) for i in range(10)]


def options(url: str, **fields) -> EndpointOptions:
    return EndpointOptions(models=("stub",), urls=(url,), streaming=True, **fields)


@pytest.fixture(scope="module")
def stub():
    with stub_process("--tokens", "4") as process:
        yield process


def run(stub: StubProcess, plan: LoadPlan, *, workers: int = 1, **fields) -> RunResult:
    with LoadGenerator(options(stub.url), REQUESTS, workers=workers) as generator:
        return generator.run(plan, **fields)


def test_workers_share_the_requests_without_gaps(stub):
    shown = []
    result = run(
        stub,
        LoadPlan(concurrency=6, requests=500),
        workers=2,
        warm_up=LoadPlan(requests=20),
        on_records=lambda records: shown.append(len(records)),
    )
    measured = result.records.select(~result.records.columns["warm_up"])
    assert len(result.records) == 520 and measured.ok.all() and result.stop_reason == "requests"
    assert sorted(measured.columns["number"].tolist()) == list(range(500))
    assert set(measured.columns["worker"].tolist()) == {0, 1}
    assert (measured.columns["output_tokens"] == 4).all() and len(measured.arrivals_ns) == 2000
    assert (measured.columns["start_ns"] >= result.start_ns).all() and result.client["workers"] == 2
    assert sum(shown) <= 520


def test_workers_share_a_rate(stub):
    result = run(stub, LoadPlan(concurrency=0, rate=500, requests=250), workers=2)
    intended = sorted(result.records.columns["intended_ns"].tolist())
    assert [ns - intended[0] for ns in intended] == [i * 2_000_000 for i in range(250)]


def test_a_parent_that_reads_late_gets_all_records():
    pauses = iter([1.0])  # the worker's messages of this time do not fit into its pipe
    with stub_process("--tokens", "2000") as stub:
        result = run(
            stub,
            LoadPlan(concurrency=4, requests=100),
            on_records=lambda _: time.sleep(next(pauses, 0)),
        )
    assert len(result.records) == 100 and len(result.records.arrivals_ns) == 200_000


def test_a_load_is_measured_until_it_is_stable(stub):
    plan = LoadPlan(concurrency=2, stable_percent=1000, window_seconds=0.2)
    result = run(stub, plan)
    assert result.stop_reason == "stable" and result.records.ok.all()
    before = result.records.columns["end_ns"] < result.start_ns
    assert (result.records.columns["warm_up"] == before).all()


def test_a_server_that_dies_ends_the_run():
    with stub_process("--tokens", "4") as stub, LoadGenerator(options(stub.url), REQUESTS) as generator:
        result = generator.run(
            LoadPlan(concurrency=2, seconds=600), on_records=lambda records: len(records) and stub.kill()
        )
    assert result.stop_reason == "server" and "the server is gone" in result.errors[0]
    assert result.records.ok.any() and stub.url in result.errors[0]


def test_a_load_that_only_fails_ends_early(stub):
    endpoint = EndpointOptions(models=("stub",), urls=(stub.url,), endpoint_type="embeddings")
    with LoadGenerator(endpoint, [PerfRequest()]) as generator:  # without a text
        result = generator.run(LoadPlan(concurrency=2, seconds=600))
    assert result.stop_reason == "errors"
    assert result.errors == ["every request fails: endpoint type 'embeddings' needs requests with a text"]


def test_waiting_for_a_model_ends_with_an_error():
    with (
        LoadGenerator(options("127.0.0.1:9"), REQUESTS) as generator,
        pytest.raises(PerfError, match="not ready"),
    ):
        generator.wait_for_model(0.3)


def test_a_target_that_cannot_be_opened_is_an_error():
    with (
        pytest.raises(PerfError, match="no-such-host"),
        LoadGenerator(options("no-such-host.invalid"), REQUESTS),
    ):
        pass
    with pytest.raises(PerfError, match="unknown type 'caht'"):
        LoadGenerator(options("x", endpoint_type="caht"), REQUESTS)
    with pytest.raises(PerfError, match="no requests"):
        LoadGenerator(options("x"), [])


def test_a_schedule_needs_timestamps(stub):
    with pytest.raises(PerfError, match="timestamp"):
        run(stub, LoadPlan(concurrency=0, schedule=True))


def test_the_default_number_of_workers_follows_the_load():
    assert default_workers(1) == 1 and default_workers(0, 10.0) == 1
    assert default_workers(100_000) >= default_workers(1000) >= 1


def test_arrivals_are_the_same_in_all_workers(stub):
    plan = LoadPlan(concurrency=0, rate=400, arrival=Arrival.POISSON, requests=100, seed=5)
    one, two = (run(stub, plan, workers=workers) for workers in (1, 2))
    offsets = [
        sorted(r.records.columns["intended_ns"] - r.records.columns["intended_ns"].min()) for r in (one, two)
    ]
    assert offsets[0] == offsets[1]


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Handle SIGINT in the usual way, here and in child processes. Shells ignore it for commands in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_loses_no_message_of_a_worker(stub, monkeypatch: pytest.MonkeyPatch):
    receive = Connection.recv
    pressed = []

    def press_ctrl_c(self: Connection):
        message = receive(self)
        if message[0] == "records" and not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return message

    monkeypatch.setattr(Connection, "recv", press_ctrl_c)
    result = run(stub, LoadPlan(concurrency=2, seconds=600))
    assert result.stop_reason == "interrupted" and not result.errors
    numbers = sorted(result.records.columns["number"].tolist())
    assert numbers and numbers == list(range(len(numbers)))


@pytest.mark.parametrize(
    ("load", "output", "message"),
    [
        ({"prefill_concurrency": (2,)}, {}, "--prefill-concurrency: only with --streaming"),
        ({}, {"goodput": ("ttfx:5",)}, "--goodput ttfx:5"),
        ({}, {"artifact_dir": Path("/dev/null/folder")}, "--artifact-dir /dev/null/folder"),
    ],
)
def test_wrong_options_are_rejected_before_the_load(load, output, message):
    endpoint = EndpointOptions(models=("m",), urls=("localhost:1",))
    with (
        pytest.raises(PerfError, match=message),
        open_generator(endpoint, LoadOptions(**load), InputOptions(), OutputOptions(**output)),
    ):
        pass


def test_only_requests_that_are_sent_are_made(stub, tmp_path):
    load = LoadOptions(request_count=3, warm_up_requests=5)
    inputs = InputOptions(input_tokens_mean=4)
    with open_generator(options(stub.url), load, inputs, OutputOptions(artifact_dir=tmp_path)) as generator:
        assert len(generator.sessions) == 5


@pytest.mark.usefixtures("ctrl_c")
async def test_ctrl_c_writes_the_report_of_what_was_done(tmp_path: Path):
    async def answer(_: StubRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.01)
        writer.write(stream(b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n', b"data: [DONE]\n\n"))

    log = tmp_path / "log"
    async with stub_server(answer) as server:
        command = ["-m", "neso.cli", "perf", "profile", "-m", "stub", "-u", server.url, "--streaming",
                   "--concurrency", "2,4", "--benchmark-duration", "600", "--isl", "10", "--ui", "simple",
                   "--no-server-metrics", "--artifact-dir", str(tmp_path)]  # fmt: skip
        with log.open("w") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=file, stderr=file, start_new_session=True
            )
        await until(lambda: len(server.requests) > 10 or process.returncode is not None)
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 60) == 130, log.read_text()
    export = tmp_path / "stub-openai-chat-concurrency2" / "profile_export_genai_perf.json"
    assert json.loads(export.read_text())["request_count"]["avg"] > 0
    assert "Traceback" not in log.read_text()
