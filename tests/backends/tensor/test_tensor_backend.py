"""`TensorBackend` with a small example model."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import sample_backends
from core_requests import collect, send_request
from eventually import until

from neso.server import backend
from neso.server.errors import ErrorCode, InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import Tensor

CONFIG = """
backend: "sample"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "EXTRA" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
BATCHED = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 20000 }" + CONFIG


def fault(text: str) -> str:
    return f"parameters {{ key: 'fault' value {{ string_value: '{text}' }} }}"


@pytest.fixture(autouse=True)
def sample(monkeypatch):
    monkeypatch.setitem(backend.BUILTIN, "sample", "sample_backends:SampleBackend")
    sample_backends.threads.clear()
    sample_backends.unloaded.clear()
    sample_backends.gate.clear()


async def infer(model, *values: float, **arrays):
    """Return the values of OUT, or the error."""
    (response,) = await asyncio.wait_for(
        collect(
            send_request(
                model,
                IN=np.array([values], np.float32)[slice(None) if model.config.max_batch_size else 0],
                **arrays,
            )
        ),
        60,
    )
    assert response.final
    return response.error or response.output("OUT").array.ravel().tolist()


async def running(count: int) -> None:
    """Wait until this many instances are executing."""
    await until(lambda: len(sample_backends.threads) >= count)


def reason(core) -> str:
    (entry,) = core.repository_index()
    return entry.reason


async def test_model_runs(serve_files):
    core = await serve_files(CONFIG + "parameters { key: 'factor' value { string_value: '3' } }", {})
    model = core.model("model")
    assert await infer(model, 1, 2) == [3, 6]
    assert await infer(model, 1, 2, EXTRA=np.array([1, 1], np.float32)) == [4, 7]
    assert model.metadata().platform == "sample"
    assert sample_backends.threads == {"model-model_0_0"}
    await core.stop()
    assert sample_backends.unloaded == ["model_0_0"]


async def test_settings_of_the_backend(serve_files):
    core = await serve_files(CONFIG, {}, backend_config={"sample": {"factor": "5"}})
    assert await infer(core.model("model"), 1) == [5]


async def test_requests_are_batched(serve_files):
    core = await serve_files(BATCHED, {})
    model = core.model("model")
    outputs = await asyncio.gather(*(infer(model, n) for n in range(16)))
    assert outputs == [[2.0 * n] for n in range(16)]
    await until(lambda: model.statistics.execution_count == 2)
    statistics = model.statistics.snapshot()
    assert statistics["inference_count"] == 16
    assert (
        statistics["execution_count"]
        == sum(b["compute_infer"]["count"] for b in statistics["batch_stats"])
        == 2
    )
    assert [b["batch_size"] for b in statistics["batch_stats"]] == [8]
    times = statistics["inference_stats"]
    assert all(times[name]["ns"] > 0 for name in ("compute_input", "compute_infer", "compute_output"))


async def test_requests_with_different_optional_inputs_are_not_batched(serve_files):
    core = await serve_files(BATCHED, {})
    model = core.model("model")
    extra = np.array([[1]], np.float32)
    outputs = await asyncio.gather(
        infer(model, 1), infer(model, 1, EXTRA=extra), infer(model, 2), infer(model, 2, EXTRA=extra)
    )
    assert outputs == [[2], [3], [4], [5]]


async def test_instances_run_concurrently(serve_files):
    core = await serve_files(CONFIG + "instance_group { count: 3 }" + fault("wait"), {})
    model = core.model("model")
    tasks = [asyncio.ensure_future(infer(model, n)) for n in range(3)]
    await running(3)
    sample_backends.gate.set()
    assert await asyncio.gather(*tasks) == [[0], [2], [4]]


async def test_cancelled_request_is_answered_while_queued(serve_files):
    core = await serve_files(CONFIG + fault("wait"), {})
    model = core.model("model")
    executed = send_request(model, IN=np.array([1], np.float32))
    await running(1)
    waiting = send_request(model, IN=np.array([2], np.float32))
    waiting.cancel()
    (response,) = await asyncio.wait_for(collect(waiting), 60)
    assert response.error.code is ErrorCode.CANCELLED
    sample_backends.gate.set()
    assert (await collect(executed))[0].output("OUT").array.tolist() == [2]
    assert await infer(model, 3) == [6]


@pytest.mark.parametrize("kind", ["raise", "exit"])
async def test_error_fails_only_its_batch(serve_files, kind):
    core = await serve_files(BATCHED + fault(kind), {})
    model = core.model("model")
    bad, good = await asyncio.gather(infer(model, 13), infer(model, 1, EXTRA=np.ones((1, 1), np.float32)))
    text = "ValueError: unlucky" if kind == "raise" else "SystemExit: 1"
    assert bad.message == f"failed to execute model instance 'model_0_0': {text}"
    assert bad.code is ErrorCode.INTERNAL
    assert good == [3]
    assert await infer(model, 2) == [4]
    assert model.statistics.failures["BACKEND"] == 1 and model.in_flight_count == 0


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no output", "model 'model' did not return output 'OUT', it returned OTHER"),
        ("dtype", "configuration expects datatype TYPE_FP32 for output 'OUT', model provides TYPE_FP64"),
        ("rows", "output 'OUT' of model 'model' has shape [7], expected the batch size 1 as first dimension"),
        ("complex", "output 'OUT' of model 'model': numpy dtype complex64 has no KServe datatype"),
        ("list", "run of model 'model' returned list, expected arrays by name"),
    ],
)
async def test_invalid_outputs_are_rejected(serve_files, kind, message):
    core = await serve_files(BATCHED + fault(kind), {})
    assert (await infer(core.model("model"), 1)).message == message


async def test_failed_loads_are_reported(serve_files):
    core = await serve_files(CONFIG + "instance_group { count: 2 }" + fault("load"), {})
    assert reason(core) == "StopIteration: not today"
    core = await serve_files(CONFIG + fault("load with a message"), {})
    assert reason(core) == "the file is broken"
    core = await serve_files(CONFIG + "parameters { key: 'factor' value { string_value: 'x' } }", {})
    assert reason(core) == "parameter 'factor' of model 'model' is 'x', expected an integer"


async def test_unload_executes_queued_requests_first(serve_files):
    core = await serve_files(CONFIG + fault("slow"), {})
    model = core.model("model")
    tasks = [asyncio.ensure_future(infer(model, n)) for n in range(3)]
    await asyncio.sleep(0)
    await core.stop()
    assert await asyncio.gather(*tasks) == [[0], [2], [4]]


SEQUENCES = """
max_batch_size: 4
sequence_batching {
  oldest { max_candidate_sequences: 4 }
  state {
    input_name: "EXTRA" output_name: "OUT" data_type: TYPE_FP32 dims: [ 1 ]
    initial_state { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true name: "zero" }
  }
}
backend: "sample"
instance_group { count: 2 }
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""


async def test_sequences_with_states(serve_files):
    """OUT = 2 IN + the previous OUT, for many sequences."""
    model = (await serve_files(SEQUENCES, {})).model("model")

    async def sequence(number: int) -> list[float]:
        results = []
        for step in range(4):
            inputs = {"IN": Tensor.from_numpy("IN", np.array([[number]], np.float32))}
            request = InferenceRequest(
                "model", inputs, sequence_id=number, sequence_start=step == 0, sequence_end=step == 3
            )
            (response,) = await collect(model.submit(request))
            assert response.error is None, response.error
            results.append(float(response.output("OUT").array[0, 0]))
        return results

    results = await asyncio.gather(*(sequence(number) for number in range(1, 13)))
    assert results == [[2.0 * n * step for step in range(1, 5)] for n in range(1, 13)]


async def test_warmup_is_executed_and_not_counted(serve_files):
    warmup = (
        "model_warmup { name: 'w' batch_size: 2 "
        "inputs { key: 'IN' value { data_type: TYPE_FP32 dims: [ 3 ] zero_data: true } } }"
    )
    model = (await serve_files(BATCHED + warmup, {})).model("model")
    assert sample_backends.threads
    assert model.statistics.snapshot()["execution_count"] == 0


def test_invalid_backends_are_rejected(monkeypatch):
    monkeypatch.setitem(backend.BUILTIN, "sample", "sample_backends:NoBackend")
    with pytest.raises(
        InvalidArgument, match=r"unable to load backend 'sample': .*NoBackend.* is not a subclass of Backend"
    ):
        backend.find_backend("sample")


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(backend.BUILTIN, "onnxruntime", "package_that_is_not_there:Backend")
    with pytest.raises(
        InvalidArgument, match=r"it needs `pip install 'neso-server\[onnx\]'`: No module named 'package_that"
    ):
        backend.find_backend("onnxruntime")


def test_unknown_backend_is_rejected():
    with pytest.raises(
        InvalidArgument, match=r"unable to find backend 'nothing', built in are .*ensemble, .* installed are"
    ):
        backend.find_backend("nothing")
