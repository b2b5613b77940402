"""In-process requests: objects, queues, cancellation, error classes, threads and event loops."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import weakref

import numpy as np
import pytest
from eventually import wait_until

import neso
from neso.server.errors import ErrorCode, ServerError
from neso.server.metadata import ModelState

FAIL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("no such thing", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""
ENDLESS = """
import threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Counts until it is cancelled.'''

    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.count, args=(request, request.get_response_sender())).start()

    def count(self, request, sender):
        number = 0
        while not sender.is_cancelled():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.float32))]))
            number += 1
            time.sleep(0.001)
        error = pb_utils.TritonError(f"cancelled at {number}", pb_utils.TritonError.CANCELLED)
        sender.send(pb_utils.InferenceResponse(error=error), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENDLESS_TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
model_transaction_policy { decoupled: true }
"""
TWO = """
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "MORE" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "SUM" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
SUM = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            a, b = (tensor.as_numpy() for tensor in request.inputs())
            answers.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", a), pb_utils.Tensor("SUM", (a.sum() + b.sum()).reshape(1))
            ]))
        return answers
"""


@pytest.fixture
def models(models):
    models.add("fail", FAIL)
    models.add("endless", ENDLESS, ENDLESS_TENSORS)
    models.add("sum", SUM, TWO)
    return models


def values(responses):
    return [response.outputs["OUT"].numpy().tolist() for response in responses]


def test_a_request_object_can_be_modified_and_resent(server):
    model = server.model("sum")
    request = model.create_request(request_id="a", outputs=["SUM"])
    request.inputs["IN"], request.inputs["MORE"] = [1, 2], np.array([3], np.float32)
    (first,) = model.infer(request)
    request.inputs["IN"] = [10, 20]
    (second,) = model.infer(request)
    assert (first.request_id, list(first.outputs)) == ("a", ["SUM"])
    assert [r.outputs["SUM"].numpy().item() for r in (first, second)] == [6, 33]
    (third,) = model.infer(neso.InferenceRequest(model, {"IN": [1], "MORE": [1]}))
    assert list(third.outputs) == ["OUT", "SUM"]


def test_outputs_share_the_memory_of_the_model(server):
    given = np.arange(1000, dtype=np.float32)
    (response,) = server.model("identity").infer(inputs={"IN": given})
    tensor = response.outputs["OUT"]
    assert tensor.data_ptr == given.ctypes.data == np.from_dlpack(tensor).ctypes.data
    torch = pytest.importorskip("torch")
    source = torch.arange(1000, dtype=torch.float32)
    (response,) = server.model("identity").infer(inputs={"IN": source})
    assert torch.from_dlpack(response.outputs["OUT"]).data_ptr() == source.data_ptr()


def test_tensors_are_released_with_their_holders(server):
    given = np.zeros(1000, np.float32)
    alive = weakref.ref(given)
    request = server.model("identity").create_request(inputs={"IN": given})
    gc.collect()
    gc.disable()
    try:
        responses = server.model("identity").infer(request)
        (response,) = responses
        request.inputs.clear()
        del given
        assert alive() is not None  # the output is the input's memory
        del response
        wait_until(lambda: alive() is None)  # the model's thread releases it a little later
    finally:
        gc.enable()
    assert list(responses) == []


def test_infer_accepts_a_request_or_its_fields(server):
    model = server.model("identity")
    with pytest.raises(TypeError, match="got both: priority"):
        model.infer(model.create_request(inputs={"IN": [1]}), priority=1)


def test_parameters_and_classification(server):
    model = server.model("identity")
    for value in ({"a": 1}, None, b"x"):
        with pytest.raises(neso.InvalidArgument, match="parameter 'p' is"):
            model.infer(inputs={"IN": [1]}, parameters={"p": value})
    (response,) = model.infer(inputs={"IN": [1]}, parameters={"a": 1, "b": 0.5, "c": False, "d": "text"})
    assert response.error is None
    (response,) = model.infer(inputs={"IN": [1, 5, 3]}, classification={"OUT": 2})
    assert [text.split(":")[1] for text in response.outputs["OUT"].to_string_array()] == ["1", "2"]


def test_a_queue_receives_all_responses(server):
    responses: queue.SimpleQueue[neso.InferenceResponse] = queue.SimpleQueue()
    iterators = [
        server.model("repeat").infer(inputs={"COUNT": [2]}, request_id=name, response_queue=responses)
        for name in "ab"
    ]
    got = [responses.get(timeout=60) for _ in range(6)]
    for name in "ab":
        mine = [r for r in got if r.request_id == name]
        assert values(mine[:2]) == [[0], [1]] and mine[2].final and not mine[2].outputs
    assert [values(iterator) for iterator in iterators] == [[[0], [1]]] * 2
    assert responses.empty()


async def test_asyncio_queue(server):
    responses: asyncio.Queue[neso.InferenceResponse] = asyncio.Queue()
    iterator = server.model("identity").async_infer(inputs={"IN": [5]}, response_queue=responses)
    assert values([await asyncio.wait_for(responses.get(), 60)]) == [[5]]
    assert values([r async for r in iterator]) == [[5]] and responses.empty()


async def test_wrong_queue_type(server):
    model = server.model("identity")
    for send_request, wrong in (
        (model.infer, asyncio.Queue()),
        (model.infer, []),
        (model.async_infer, queue.SimpleQueue()),
        (model.async_infer, asyncio.Queue(maxsize=3)),
    ):
        with pytest.raises(neso.InvalidArgument, match="response_queue"):
            send_request(inputs={"IN": [1]}, response_queue=wrong)


def test_a_queue_receives_errors_as_responses(server):
    responses: queue.SimpleQueue[neso.InferenceResponse] = queue.SimpleQueue()
    iterator = server.model("fail").infer(inputs={"IN": [1]}, response_queue=responses)
    assert isinstance(responses.get(timeout=60).error, neso.NotFound)
    with pytest.raises(neso.NotFound, match="no such thing"):
        next(iterator)
    assert list(iterator) == []


def test_failed_conversion_becomes_an_error_in_the_queue(server, monkeypatch):
    responses: queue.SimpleQueue[neso.InferenceResponse] = queue.SimpleQueue()
    broken = ValueError("broken")

    def move(self, device):
        raise broken

    monkeypatch.setattr(neso.Tensor, "to_device", move)
    iterator = server.model("identity").infer(
        inputs={"IN": [1]}, response_queue=responses, output_memory_type="gpu"
    )
    assert "broken" in str(responses.get(timeout=60).error)
    with pytest.raises(ValueError, match="broken"):
        next(iterator)
    (response,) = server.model("identity").infer(inputs={"IN": [1]})
    assert response.error is None


def test_output_memory_type(server):
    (response,) = server.model("identity").infer(inputs={"IN": [1]}, output_memory_type="cpu")
    assert response.outputs["OUT"].memory_type is neso.MemoryType.CPU
    with pytest.raises(neso.InvalidArgument, match="invalid memory type 'unsupported'"):
        server.model("identity").infer(inputs={"IN": [1]}, output_memory_type="unsupported")


def test_cancel_a_running_stream(server):
    responses = server.model("endless").infer(inputs={"IN": [1]})
    assert values([next(responses), next(responses)]) == [[0], [1]]
    responses.cancel()
    with pytest.raises(neso.Cancelled, match="cancelled at"):
        for _ in responses:
            pass
    assert list(responses) == []


async def test_cancel_a_running_stream_from_another_loop(server):
    responses = server.model("endless").async_infer(inputs={"IN": [1]}, raise_on_error=False)
    seen = []
    async for response in responses:
        seen.append(response)
        if len(seen) == 3:
            responses.cancel()
    assert seen[-1].final and isinstance(seen[-1].error, neso.Cancelled)
    assert [r.error for r in seen[:3]] == [None] * 3


def test_cancel_reaches_all_submissions(server):
    model = server.model("endless")
    request = model.create_request(inputs={"IN": [1]})
    request.cancel()  # nothing to cancel yet
    flights = [model.infer(request, raise_on_error=False) for _ in range(3)]
    for responses in flights:
        next(responses)
    request.cancel()
    for responses in flights:
        *_, last = responses
        assert isinstance(last.error, neso.Cancelled)
    assert server.in_flight == set()
    request.cancel()


def test_the_loop_of_the_caller_can_close_first(server):
    async def leave():
        responses = server.model("endless").async_infer(inputs={"IN": [1]})
        await anext(responses)

    asyncio.run(leave())
    wait_until(lambda: not server.in_flight)  # cancelled when the next response had no receiver


async def test_an_iterator_has_one_reader(server):
    responses = server.model("slow").async_infer(inputs={"IN": [1]}, raise_on_error=False)
    reader = asyncio.ensure_future(anext(responses))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="another task awaits"):
        await anext(responses)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    responses.cancel()
    assert (await anext(responses)).final


def test_errors_have_classes(server):
    with pytest.raises(neso.NotFound):
        server.model("nope")
    with pytest.raises(neso.NotFound, match="no such thing"):
        next(server.model("fail").infer(inputs={"IN": [1]}))
    with pytest.raises(neso.InvalidArgument):
        server.model("identity").infer(inputs={})
    server.unload("fail")
    with pytest.raises(neso.Unavailable):
        server.model("fail")
    assert {type(ServerError("m", code)).code for code in ErrorCode} == set(ErrorCode)
    assert type(ServerError("m")) is ServerError and ServerError("m").code is ErrorCode.INTERNAL
    assert all(isinstance(ServerError("m", code), ServerError) for code in ErrorCode)
    assert neso.NotFound("m", ErrorCode.UNAVAILABLE).code is ErrorCode.UNAVAILABLE


def test_async_infer_raises_immediately(server):
    async def send_request():
        with pytest.raises(neso.InvalidArgument, match="unexpected inference input"):
            server.model("identity").async_infer(inputs={"X": [1]})

    asyncio.run(send_request())
    with pytest.raises(RuntimeError, match="no running event loop"):
        server.model("identity").async_infer(inputs={"IN": [1]})


def test_calls_on_the_loop_of_the_server(server):
    model = server.model("repeat")

    async def send_request():
        with pytest.raises(RuntimeError, match="own thread must not wait"):
            model.infer(inputs={"COUNT": [1]})
        return values([response async for response in model.async_infer(inputs={"COUNT": [2]})])

    assert server.wait_for(send_request()) == [[0], [1]]


def test_models_by_name_and_version(server):
    models = server.models()
    assert {("identity", "1"), ("endless", "1")} <= set(models) and len(models) == 7
    assert "identity" in models and "nope" not in models and ("identity", "2") not in models
    assert values(models["identity"].infer(inputs={"IN": [1]})) == [[1]]
    assert models["identity", 1].state is ModelState.READY and models["identity"].version == ""
    server.unload(models["identity"])
    assert server.models()["identity", 1].state is ModelState.UNAVAILABLE
    assert server.models()["identity", 1].reason == "unloaded"
    assert ("identity", "1") not in server.models(ready_only=True)
    with pytest.raises(KeyError):
        server.models()["nope"]


def test_custom_metrics_of_the_program(server):
    family = server.metric_family("program_jobs", "Jobs done", neso.MetricKind.COUNTER)
    metric = family.metric({"kind": "big"})
    assert isinstance(metric, neso.Metric) and isinstance(family, neso.MetricFamily)
    metric.increment(2)
    assert 'program_jobs{kind="big"} 2' in server.metrics()
    with pytest.raises(neso.AlreadyExists):
        server.metric_family("program_jobs", "Jobs done", neso.MetricKind.GAUGE)


def test_register_a_repository(server, tmp_path):
    from repository_builder import RepositoryBuilder

    RepositoryBuilder(tmp_path / "more").add("other")
    server.register_model_repository(tmp_path / "more", {"other": "renamed"})
    assert values(server.load("renamed").infer(inputs={"IN": [1]})) == [[1]]
    server.unload("renamed")
    server.unregister_model_repository(tmp_path / "more")
    with pytest.raises(ServerError):
        server.load("renamed")


def test_poll_requires_poll_mode(server):
    with pytest.raises(ServerError):
        server.poll_model_repository()


def test_options(models):
    options = neso.Options(
        model_repository=str(models.path), model_control_mode="explicit", startup_models=["text"]
    )
    assert options.model_control_mode is neso.ModelControlMode.EXPLICIT
    assert (options.model_repository, options.startup_models) == ((str(models.path),), ("text",))
    assert neso.Options(model_repository=models.path).model_repository == (models.path,)
    with neso.Server(options) as server:
        assert [name for name, _ in server.models(ready_only=True)] == ["text"]
    with pytest.raises(TypeError, match="not both"):
        neso.Server(options, server_id="x")
    with pytest.raises(TypeError):
        neso.Server(no_such_option=1)
    with pytest.raises(neso.InvalidArgument, match="unknown model control mode 'sometimes'"):
        neso.Server(model_control_mode="sometimes")


def test_concurrent_threads_and_loops(server):
    model, repeat = server.model("identity"), server.model("repeat")
    wrong: list[object] = []

    def thread(index):
        for n in range(30):
            if values(model.infer(inputs={"IN": [index, n]})) != [[index, n]]:
                wrong.append((index, n))

    async def task(index):
        for n in range(10):
            got = [r.outputs["OUT"].numpy().item() async for r in repeat.async_infer(inputs={"COUNT": [n]})]
            if got != list(range(n)):
                wrong.append((index, got))

    async def loop():
        await asyncio.gather(*(task(index) for index in range(4)))

    threads = [threading.Thread(target=thread, args=(index,)) for index in range(4)]
    threads += [threading.Thread(target=lambda: asyncio.run(loop())) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert wrong == [] and not any(each.is_alive() for each in threads) and server.in_flight == set()


def test_stop_with_requests_in_flight(models):
    server = neso.Server(model_repository=models.path, exit_timeout=0.1).start(wait_until_ready=True)
    responses: queue.SimpleQueue[neso.InferenceResponse] = queue.SimpleQueue()
    waiting = [
        server.model(name).infer(inputs={"IN": [1]}, raise_on_error=False, response_queue=responses)
        for name in ("slow", "endless")
        for _ in range(3)
    ]

    other = threading.Thread(target=server.stop)

    async def wait():
        responses = server.model("slow").async_infer(inputs={"IN": [1]}, raise_on_error=False)
        other.start()
        return [response async for response in responses]

    (last,) = asyncio.run(wait())
    assert last.error is not None and last.final
    for iterator in waiting:
        *_, last = iterator
        assert isinstance(last.error, ServerError) and last.final
    other.join()
    with pytest.raises(neso.Unavailable):
        server.model("slow")
