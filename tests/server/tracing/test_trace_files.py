"""Trace files in Triton's format, written by a core with Python models."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest
from core_requests import collect
from eventually import until
from trace_reader import check_order, read_traces

from neso.server.inference_request import InferenceRequest
from neso.server.tensor import Tensor
from neso.server.tracing import TraceConfig
from neso.server.tracing.trace_file import Held, TraceFile

ENSEMBLE = """
platform: "ensemble"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
ensemble_scheduling {
  step {
    model_name: "identity" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "mid" }
  }
  step {
    model_name: "second" model_version: -1
    input_map { key: "IN" value: "mid" } output_map { key: "OUT" value: "OUT" }
  }
}
"""
BROKEN = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("so")
"""
CALLER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            assert request.trace().get_context() is None
            for trace in (request.trace(), None):
                call = pb_utils.InferenceRequest(
                    model_name="identity", inputs=request.inputs(), requested_output_names=["OUT"], trace=trace
                )
                answer = call.exec()
            responses.append(pb_utils.InferenceResponse(answer.output_tensors()))
        return responses
"""


def add_ensemble(repository):
    folder = repository.path / "both"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(ENSEMBLE)


async def send_traced_request(core, model: str, id: str = "") -> None:
    """Send a request like a frontend."""
    trace = core.tracing.sample(model)
    if trace is not None:
        trace.stamp("HTTP_RECV_START")
        trace.stamp("HTTP_RECV_END")
    tensor = Tensor.from_numpy("IN", np.array([0.1, 2], np.float32))
    stream = core.model(model).submit(InferenceRequest(model, {"IN": tensor}, id=id, trace=trace))
    (response,) = await collect(stream)
    assert response.error is None, response.error
    if trace is not None:
        trace.stamp("HTTP_SEND_START")
        trace.stamp("HTTP_SEND_END")
        trace.end()


@pytest.fixture
def start(start_core, repository, tmp_path):
    async def start(*settings: str):
        path = tmp_path / "trace.json"
        core = await start_core(
            trace=TraceConfig.parse([f"triton,file={path}", "rate=1", *(settings or ("level=TIMESTAMPS",))])
        )
        return core, path

    return start


async def test_timestamps(start, repository):
    repository.add("identity", versions=("3",))
    core, path = await start()
    await send_traced_request(core, "identity", 'a "quoted" id')
    await core.stop()
    (trace,) = read_traces(path)
    assert (trace.model, trace.version, trace.request_id, trace.parent_id) == (
        "identity",
        3,
        'a "quoted" id',
        None,
    )
    assert list(trace.timestamps) == [
        *(
            "HTTP_RECV_START",
            "HTTP_RECV_END",
            "REQUEST_START",
            "QUEUE_START",
            "COMPUTE_START",
            "COMPUTE_INPUT_END",
        ),
        *("COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END", "INFER_RESPONSE_COMPLETE"),
        *("HTTP_SEND_START", "HTTP_SEND_END"),
    ]
    check_order(trace.timestamps)
    assert trace.tensors == []


async def test_tensors(start, repository):
    repository.add("identity")
    core, path = await start("level=TENSORS")
    trace = core.tracing.sample("identity")
    tensor = Tensor.from_numpy("IN", np.array([0.1, 2], np.float32))
    stream = core.model("identity").submit(InferenceRequest("identity", {"IN": tensor}, trace=trace))
    await collect(stream)
    trace.end()
    await core.stop()
    entries = json.loads(path.read_text())
    assert [entry.get("activity") for entry in entries] == [
        None,
        "TENSOR_QUEUE_INPUT",
        "TENSOR_BACKEND_INPUT",
        "TENSOR_BACKEND_OUTPUT",
    ]
    assert entries[1]["tensor"] == {"name": "IN", "data": "0.1,2.0", "shape": "2", "dtype": "FP32"}
    assert entries[3]["tensor"]["name"] == "OUT"


async def test_steps_of_an_ensemble_are_children(start, repository):
    repository.add("identity")
    repository.add("second")
    add_ensemble(repository)
    core, path = await start()
    await send_traced_request(core, "both", "r")
    await core.stop()
    traces = {trace.model: trace for trace in read_traces(path)}
    assert traces["both"].parent_id is None and "COMPUTE_START" not in traces["both"].timestamps
    for step in ("identity", "second"):
        assert (traces[step].parent_id, traces[step].request_id) == (traces["both"].id, "r")
        check_order(traces[step].timestamps)
        assert traces["both"].timestamps["REQUEST_END"] >= traces[step].timestamps["COMPUTE_END"]


async def test_calls_of_a_model_are_children_if_it_passes_its_trace(start, repository):
    repository.add("identity")
    repository.add("caller", CALLER)
    core, path = await start()
    await send_traced_request(core, "caller")
    await core.stop()
    caller, called = read_traces(path)
    assert (caller.model, called.model, called.parent_id) == ("caller", "identity", caller.id)


async def test_a_cached_response(start_core, repository, tmp_path):
    repository.add("identity", config=_cached(repository))
    core = await start_core(
        response_cache_size=1 << 20,
        trace=TraceConfig.parse([f"triton,file={tmp_path}/t", "rate=1", "level=TIMESTAMPS"]),
    )
    await send_traced_request(core, "identity")
    await send_traced_request(core, "identity")
    await core.stop()
    miss, hit = read_traces(tmp_path / "t")
    assert {"CACHE_MISS_LOOKUP_START", "CACHE_MISS_LOOKUP_END", "COMPUTE_START"} <= miss.timestamps.keys()
    assert {"CACHE_MISS_INSERTION_START", "CACHE_MISS_INSERTION_END"} <= miss.timestamps.keys()
    assert {"CACHE_HIT_LOOKUP_START", "CACHE_HIT_LOOKUP_END", "REQUEST_END"} <= hit.timestamps.keys()
    assert "COMPUTE_START" not in hit.timestamps


def _cached(repository) -> str:
    from repository_builder import IDENTITY_TENSORS

    return IDENTITY_TENSORS + "response_cache { enable: true }"


async def test_numbered_files(start, repository):
    repository.add("identity")
    core, path = await start("level=TIMESTAMPS", "triton,log-frequency=2")
    for _ in range(5):
        await send_traced_request(core, "identity")
    await core.stop()
    assert [len(read_traces(path.with_name(f"trace.json.{i}"))) for i in range(3)] == [2, 2, 1]
    assert not path.exists() and not path.with_name("trace.json.3").exists()


async def test_a_count_fills_one_numbered_file(start, repository):
    repository.add("identity")
    core, path = await start("level=TIMESTAMPS", "count=3")
    for _ in range(5):
        await send_traced_request(core, "identity")
    numbered = path.with_name("trace.json.0")
    await until(lambda: numbered.exists() and numbered.read_text().endswith("]"))
    assert len(read_traces(numbered)) == 3
    assert not core.tracing.enabled
    await core.stop()
    assert not path.exists()


async def test_a_count_that_is_not_reached_fills_the_file_without_a_number(start, repository):
    repository.add("identity")
    core, path = await start("level=TIMESTAMPS", "count=3")
    await send_traced_request(core, "identity")
    core.tracing.update({"trace_rate": ["2"]})
    for _ in range(4):
        await send_traced_request(core, "identity")
    await core.stop()
    assert len(read_traces(path)) == 3
    assert not path.with_name("trace.json.0").exists()


@pytest.mark.parametrize("limit", ["MAX_BUFFERED", "MAX_BUFFERED_BYTES"])
async def test_traces_that_wait_for_their_file_do_not_stay_in_memory(start, repository, monkeypatch, limit):
    monkeypatch.setattr(f"neso.server.tracing.trace_file.{limit}", 2)
    repository.add("identity")
    core, path = await start("level=TIMESTAMPS", "level=TENSORS", "count=5")
    buffer = core.tracing._samplers[""]._sink
    for sent in range(1, 5):
        await send_traced_request(core, "identity")
        assert len(buffer._traces) == (sent % 2 if limit == "MAX_BUFFERED" else 0)
    assert sorted(file.name for file in path.parent.glob("trace.json*")) == []
    await send_traced_request(core, "identity")
    core.tracing.update({"trace_count": ["9"]})
    for _ in range(3):
        await send_traced_request(core, "identity")
    await core.stop()
    assert len(read_traces(path.with_name("trace.json.0"))) == 5
    assert len(read_traces(path)) == 3
    assert {len(trace.tensors) for trace in read_traces(path)} == {3}


async def test_a_count_that_is_reached_after_a_settings_change_is_appended(start, repository):
    repository.add("identity")
    repository.add_standard()
    core, path = await start("level=TIMESTAMPS", "count=2")
    await send_traced_request(core, "identity")
    slow = asyncio.create_task(send_traced_request(core, "slow"))
    await until((repository.path / "slow" / "1" / "begun").exists)
    core.tracing.update({"trace_level": ["OFF"]})
    (repository.path / "slow" / "1" / "go").touch()
    await slow
    await core.stop()
    assert [trace.model for trace in read_traces(path)] == ["identity", "slow"]
    assert not path.with_name("trace.json.0").exists()


async def test_the_file_is_readable_while_the_server_runs(start, repository, monkeypatch):
    monkeypatch.setattr("neso.server.tracing.trace_file.FLUSH_AFTER", 0.01)
    repository.add("identity")
    core, path = await start()

    def has_traces(count: int) -> bool:
        return path.exists() and path.read_text().count("REQUEST_END") == count

    for count in (1, 2, 3):
        await send_traced_request(core, "identity")
        await until(lambda count=count: has_traces(count))
        assert len(read_traces(path)) == count


async def test_a_settings_change_writes_all_traces(start, repository):
    repository.add("identity")
    repository.add_standard()
    core, path = await start("level=TIMESTAMPS", "triton,log-frequency=10")
    await send_traced_request(core, "identity")
    slow = asyncio.create_task(send_traced_request(core, "slow"))
    await until((repository.path / "slow" / "1" / "begun").exists)
    core.tracing.update({"trace_level": ["OFF"]})
    await send_traced_request(core, "identity")
    (repository.path / "slow" / "1" / "go").touch()
    await slow
    await core.stop()
    first, second = (read_traces(path.with_name(f"trace.json.{i}")) for i in range(2))
    assert [trace.model for trace in (*first, *second)] == ["identity", "slow"]


async def test_failed_requests_are_traced_completely(start, repository):
    repository.add("broken", BROKEN)
    core, path = await start()
    trace = core.tracing.sample("broken")
    trace.stamp("HTTP_RECV_START")
    tensor = Tensor.from_numpy("IN", np.ones(1, np.float32))
    (response,) = await collect(
        core.model("broken").submit(InferenceRequest("broken", {"IN": tensor}, trace=trace))
    )
    assert response.error is not None
    trace.end()
    await core.stop()
    (read,) = read_traces(path)
    assert "REQUEST_END" in read.timestamps


async def test_requests_succeed_without_a_writable_trace_file(start_core, repository, tmp_path, caplog):
    repository.add("identity")
    core = await start_core(
        trace=TraceConfig.parse([f"triton,file={tmp_path}/no/where", "rate=1", "level=TIMESTAMPS"])
    )
    await send_traced_request(core, "identity")
    await core.stop()
    assert "failed to write the trace file" in caplog.text and "No such file" in caplog.text


@pytest.mark.parametrize("setting", ["triton,log-frequency=1", "count=-1"])
async def test_traces_are_dropped_if_the_disk_is_too_slow(start, repository, monkeypatch, caplog, setting):
    ready = threading.Event()
    for name in ("_append", "_write"):
        write = getattr(TraceFile, name)

        def wait(*arguments, write=write):
            assert ready.wait(60)
            write(*arguments)

        monkeypatch.setattr(TraceFile, name, wait if name == "_append" else staticmethod(wait))
    monkeypatch.setattr("neso.server.tracing.trace_file.MAX_PENDING", 10)
    monkeypatch.setattr("neso.server.tracing.trace_file.FLUSH_AFTER", 1000)
    monkeypatch.setattr("neso.server.tracing.trace_file.MAX_BUFFERED", 2)
    repository.add("identity")
    core, path = await start("level=TIMESTAMPS", setting)
    for _ in range(30):
        await send_traced_request(core, "identity")
    assert "traces are dropped" in caplog.text
    ready.set()
    await until(lambda: "20 traces were dropped" in caplog.text)
    await send_traced_request(core, "identity")
    await core.stop()
    files = (
        [path] if setting == "count=-1" else [path.with_name(f"trace.json.{index}") for index in range(11)]
    )
    assert sum(len(read_traces(file)) for file in files) == 11


async def test_held_traces_are_written_if_later_ones_are_dropped(start, repository, monkeypatch, caplog):
    monkeypatch.setattr("neso.server.tracing.trace_file.MAX_BUFFERED", 2)
    ready = threading.Event()
    add = Held.add

    def wait(held, traces):
        assert ready.wait(60)
        add(held, traces)

    monkeypatch.setattr(Held, "add", wait)
    monkeypatch.setattr("neso.server.tracing.trace_file.MAX_PENDING", 4)
    repository.add("identity")
    core, path = await start("level=TIMESTAMPS", "count=8")
    for _ in range(8):
        await send_traced_request(core, "identity")
    ready.set()
    await core.stop()
    assert "4 traces were dropped" in caplog.text
    assert len(read_traces(path.with_name("trace.json.0"))) == 4
