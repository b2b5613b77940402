"""The queue of a stage: which worker gets which request, and what happens when a worker is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from eventually import until
from tritonclient.grpc.model_config_pb2 import ModelConfig

import neso.server.processes.messages as wire
from neso.cluster.stages.manifold import Manifold
from neso.cluster.stages.messages import Flow, Outcome, StageReport, Stop, Task, Work
from neso.cluster.stages.stage import Stage, StageWorker
from neso.engine.core.stats import EngineStats
from neso.generation import Span
from neso.server.backlog import Backlog
from neso.server.errors import Cancelled, InternalError, Overloaded, Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import DataType, Tensor


class Bench:
    """A stage whose workers are in this test. `sent`: messages by worker."""

    def __init__(self, max_attempts: int = 3, **batching: Any) -> None:
        config = ModelConfig(dynamic_batching=batching)
        self.sent: dict[str, list[Any]] = {}
        manifold = Manifold(lambda name: name in self.stage.workers, self._send)
        self.stage = Stage("scale", "1", config.dynamic_batching, max_attempts, manifold, self._send)

    def _send(self, name: str, message: msgspec.Struct) -> None:
        self.sent.setdefault(name, []).append(message)

    def worker(self, name: str, slots: int = 1) -> StageWorker:
        worker = StageWorker(name, "here", slots)
        self.stage.add(worker)
        return worker

    async def submit(self, name: str, **fields: Any) -> ResponseStream:
        stream = request(name, **fields)
        self.stage.submit(stream)
        await asyncio.sleep(0)
        return stream

    def tasks(self, worker: StageWorker) -> list[Task]:
        return [
            task
            for message in self.sent.get(worker.name, [])
            if isinstance(message, Work)
            for task in message.tasks
        ]

    def ids(self, worker: StageWorker) -> list[str]:
        """Ids of the requests that the worker got."""
        return [wire.decoder.decode(task.request).id for task in self.tasks(worker)]

    async def answer(self, worker: StageWorker, task: Task, value: float, *, final: bool = True) -> None:
        response = InferenceResponse(
            "scale", "1", outputs=[Tensor.from_numpy("Y", np.float32([value]))], final=final
        )
        encoded = msgspec.Raw(wire.pack_response(task.number, response))
        outcome = Outcome(task.number, task.attempt, encoded, (1000, 2000, 3000) if final else None)
        self.stage.report(worker, StageReport(True, [outcome]))
        await asyncio.sleep(0)


def request(
    name: str, *, batch_size: int = 1, backlog: Backlog | None = None, **fields: Any
) -> ResponseStream:
    inputs = {"X": Tensor.from_numpy("X", np.float32([1, 2]))}
    return ResponseStream(InferenceRequest("scale", inputs, id=name, **fields), None, batch_size, backlog)


async def value(stream: ResponseStream) -> float:
    response = await anext(stream)
    response.raise_error()
    return float(response.outputs[0].array[0])


async def test_worker_gets_as_many_requests_as_it_executes_at_a_time():
    bench = Bench()
    worker = bench.worker("a", slots=2)
    first, second, third = [await bench.submit(name) for name in ("1", "2", "3")]
    assert bench.ids(worker) == ["1", "2"]
    assert bench.stage.num_waiting == 1
    await bench.answer(worker, bench.tasks(worker)[1], 20.0)
    assert bench.ids(worker) == ["1", "2", "3"]
    assert await value(second) == 20.0
    for stream, number in ((first, 0), (third, 2)):
        await bench.answer(worker, bench.tasks(worker)[number], float(number))
        assert await value(stream) == float(number)
    assert not worker.jobs


async def test_simultaneous_requests_are_given_in_one_message():
    bench = Bench()
    worker = bench.worker("a", slots=4)
    for name in ("1", "2", "3"):
        bench.stage.submit(request(name))
    await asyncio.sleep(0)
    assert len(bench.sent["a"]) == 1
    assert bench.ids(worker) == ["1", "2", "3"]


async def test_request_that_cannot_be_encoded_fails_and_others_go_on():
    bench = Bench()
    worker = bench.worker("a", slots=2)
    broken = request("broken")
    broken.request.inputs["X"] = Tensor("X", DataType.BYTES, np.array([3], np.object_))
    bench.stage.submit(broken)
    other = await bench.submit("other")
    with pytest.raises(InternalError, match="the request to stage 'scale' cannot be encoded"):
        await value(broken)
    assert bench.ids(worker) == ["other"]
    assert not other.closed and worker.num_used == 1


async def test_requests_go_to_the_least_loaded_worker_and_slow_ones_do_not_hold_up_others():
    bench = Bench()
    slow, fast = bench.worker("slow"), bench.worker("fast")
    for name in ("1", "2", "3", "4"):
        await bench.submit(name)
    for number in range(2):
        await bench.answer(fast, bench.tasks(fast)[number], 0.0)
    assert (bench.ids(slow), bench.ids(fast)) == (["1"], ["2", "3", "4"])


async def test_idle_worker_takes_a_request_that_is_larger_than_its_slots():
    bench = Bench()
    worker = bench.worker("a", slots=2)
    await bench.submit("large", batch_size=8)
    await bench.submit("small")
    assert bench.ids(worker) == ["large"]


async def test_requests_of_a_lost_worker_are_repeated_first_and_in_order():
    bench = Bench()
    lost = bench.worker("lost", slots=2)
    streams = [await bench.submit(name) for name in ("1", "2", "3")]
    old = bench.tasks(lost)[0]
    bench.stage.lose(lost, "it was killed")
    other = bench.worker("other", slots=3)
    await until(lambda: bench.ids(other) == ["1", "2", "3"])
    assert [task.attempt for task in bench.tasks(other)] == [2, 2, 1]
    await bench.answer(lost, old, -1.0)  # of an earlier attempt
    for number, stream in enumerate(streams):
        await bench.answer(other, bench.tasks(other)[number], float(number))
        assert await value(stream) == float(number)
    assert (bench.stage.counters.retries, bench.stage.counters.lost_workers) == (2, 1)


async def test_request_fails_after_its_last_attempt():
    bench = Bench(max_attempts=2)
    stream = await bench.submit("1")
    for name in ("a", "b"):
        worker = bench.worker(name)
        await until(lambda worker=worker: bench.ids(worker))
        bench.stage.lose(worker, "it was killed")
    with pytest.raises(Unavailable, match="has lost 2 workers, the last one because it was killed"):
        await value(stream)
    assert bench.stage.counters.failed == 1


async def test_request_whose_worker_has_sent_a_response_is_not_repeated():
    bench = Bench()
    worker = bench.worker("a")
    stream = await bench.submit("1", backlog=Backlog(2**20))
    await bench.answer(worker, bench.tasks(worker)[0], 1.0, final=False)
    assert await value(stream) == 1.0
    bench.stage.lose(worker, "it was killed")
    with pytest.raises(Unavailable, match="lost after it has sent responses"):
        await value(stream)


async def test_cancelled_requests_leave_the_queue_and_stop_at_their_worker():
    bench = Bench()
    worker = bench.worker("a")
    running, waiting = await bench.submit("1"), await bench.submit("2")
    waiting.cancel()
    running.cancel()
    assert bench.sent["a"][1:] == [Stop(bench.tasks(worker)[0].number, 1)]
    with pytest.raises(Cancelled):
        await value(waiting)
    bench.stage.lose(worker, "it was killed")
    with pytest.raises(Cancelled):
        await value(running)
    assert bench.stage.num_waiting == 0


async def test_request_that_waits_for_another_worker_can_be_cancelled():
    bench = Bench()
    worker = bench.worker("a")
    stream = await bench.submit("1")
    bench.stage.lose(worker, "it was killed")
    stream.cancel()
    with pytest.raises(Cancelled):
        await value(stream)
    other = bench.worker("b")
    later = await bench.submit("2")
    assert bench.ids(other) == ["2"]
    assert not later.closed


async def test_priorities_and_limits_of_the_queue():
    bench = Bench(priority_levels=2, default_priority_level=2, default_queue_policy={"max_queue_size": 2})
    low, low2, full = [await bench.submit(name) for name in ("low", "low2", "full")]
    await bench.submit("high", priority=1)
    with pytest.raises(Overloaded, match="Exceeds maximum queue size"):
        await value(full)
    worker = bench.worker("a", slots=3)
    await until(lambda: len(bench.ids(worker)) == 3)
    assert bench.ids(worker) == ["high", "low", "low2"]
    assert not (low.closed or low2.closed)


async def test_worker_that_ends_gets_no_more_requests():
    bench = Bench()
    ending, other = bench.worker("ending", slots=8), bench.worker("other")
    bench.stage.report(ending, StageReport(False))
    await bench.submit("1")
    await bench.submit("2")
    assert (bench.ids(ending), bench.ids(other)) == ([], ["1"])


async def test_request_that_stops_others_goes_to_their_worker_beside_its_slots():
    bench = Bench()
    worker, idle = bench.worker("a"), bench.worker("b")
    running, other, waiting = await bench.submit("x"), await bench.submit("other"), await bench.submit("x")
    stop = request("x")
    bench.stage.stop_requests(stop)
    assert bench.ids(worker) == ["x", "x"] and bench.ids(idle) == ["other"]
    for stream in (stop, waiting):
        assert (await anext(stream)).flag_only
    await bench.answer(worker, bench.tasks(worker)[1], 0.0)
    await bench.answer(worker, bench.tasks(worker)[0], 3.0)
    assert await value(running) == 3.0
    assert bench.stage.num_waiting == 0 and not other.closed and not worker.jobs


async def test_statistics_of_lost_engines_are_kept():
    bench = Bench()
    first, second = bench.worker("a"), bench.worker("b")
    bench.stage.report(first, StageReport(True, stats=EngineStats(step=5, num_running=2, preemptions=1)))
    bench.stage.report(second, StageReport(True, stats=EngineStats(step=7, num_running=1)))
    bench.stage.report(second, StageReport(True))
    bench.stage.lose(first, "it was killed")
    stats = bench.stage.stats
    assert (stats.step, stats.num_running, stats.preemptions) == (12, 1, 1)


async def test_worker_waits_for_a_slow_client():
    bench = Bench()
    worker = bench.worker("a")
    stream = await bench.submit("1", backlog=Backlog(600))
    task = bench.tasks(worker)[0]
    for number in range(2):
        await bench.answer(worker, task, float(number), final=False)
    assert bench.sent["a"][1:] == [Flow(task.number, 1, True)]
    assert [await value(stream), await value(stream)] == [0.0, 1.0]
    assert bench.sent["a"][2:] == [Flow(task.number, 1, False)]


async def test_times_of_a_request_are_those_that_its_worker_has_measured():
    bench = Bench()
    worker = bench.worker("a")
    stream = await bench.submit("1")
    await asyncio.sleep(0.001)
    await bench.answer(worker, bench.tasks(worker)[0], 1.0)
    timeline = stream.timeline
    assert timeline.input_end - timeline.compute_start == 1000
    assert timeline.output_start - timeline.input_end == 2000


async def test_response_with_a_pickle_is_refused():
    bench = Bench()
    worker = bench.worker("a")
    await bench.submit("1")
    task = bench.tasks(worker)[0]
    evil = wire.Response(task.number, "scale", "1", "", [], {}, True, 0, None, b"pickle")
    outcome = Outcome(task.number, 1, msgspec.Raw(wire.encoder.encode(evil)))
    with pytest.raises(ValueError, match="not the response of a model with tensors"):
        bench.stage.report(worker, StageReport(True, [outcome]))


class Recorder:
    """The trace of a request."""

    def __init__(self) -> None:
        self.phases: list[Span] = []


async def test_spans_of_a_request_that_loses_its_worker():
    bench = Bench()
    first = bench.worker("a")
    stream = request("1")
    stream.trace = recorder = Recorder()  # type: ignore[assignment]
    bench.stage.submit(stream)
    await asyncio.sleep(0)
    bench.stage.lose(first, "it has ended")
    second = bench.worker("b")
    await asyncio.sleep(0)
    (task,) = bench.tasks(second)
    response = wire.pack_response(task.number, InferenceResponse("scale", "1", final=True))
    outcome = Outcome(task.number, task.attempt, msgspec.Raw(response), (1, 2, 3), {}, (5, "tcp"))
    bench.stage.report(second, StageReport(True, [outcome]))
    assert [
        (span.name, span.attributes["worker"], span.attributes["attempt"], span.error)
        for span in recorder.phases
    ] == [
        ("queue", "a", 1, ""),
        ("execute", "a", 1, "it has ended"),
        ("queue", "b", 2, ""),
        ("tensor_transfer", "b", 2, ""),
        ("execute", "b", 2, ""),
    ]
    assert all(span.start_ns <= span.end_ns for span in recorder.phases)
    transfer = recorder.phases[3]
    assert transfer.end_ns - transfer.start_ns == 5
    assert transfer.attributes["transport"] == "tcp"
