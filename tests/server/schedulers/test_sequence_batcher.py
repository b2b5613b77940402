"""The sequence batcher with a backend whose executions end when the test decides."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from event_loop import error_of, settle
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig
from virtual_time import run_in_virtual_time

from neso.server.errors import Cancelled, InternalError, InvalidArgument, Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.schedulers.sequence_batcher import SequenceBatcher
from neso.server.signature import Signature
from neso.server.statistics import FailureReason
from neso.server.tensor import Tensor

pytestmark = pytest.mark.usefixtures("virtual_time")

TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


class Instances:
    """Records the batches and their instances and ends them one by one.

    Requests of sequence 7 are written "+7", "7", "-7" or "±7": START, no flag, END or both.
    """

    def __init__(self, batching: str = "", count: int = 1, size: int = 2, concatenates: bool = False) -> None:
        config = ModelConfig()
        text_format.Parse(
            f'name: "m" max_batch_size: {size} {TENSORS} sequence_batching {{ {batching} }}', config
        )
        self.signature = Signature(config)
        self.running: dict[int, tuple[list[ResponseStream], Callable[[], None]]] = {}
        self.batches: list[tuple[int, list[str]]] = []
        self.batcher = SequenceBatcher(
            config, self.signature, self.execute, count, Path(), concatenates=concatenates
        )

    def execute(self, batch: list[ResponseStream], done: Callable[[], None], instance: int) -> None:
        assert instance not in self.running
        for stream in batch:
            assert not stream.closed
            stream.timeline.compute_start = 1
        self.running[instance] = (batch, done)
        self.batches.append((instance, [stream.request.id for stream in batch]))

    def submit(
        self, flags: str, name: str = "", width: int = 2, rows: int = 1, timeout_us: int = 0
    ) -> ResponseStream:
        tensor = Tensor.from_numpy("IN", np.zeros((rows, width), np.float32))
        text = flags.lstrip("+-±")
        request = InferenceRequest(
            "m",
            {"IN": tensor},
            id=name or flags,
            sequence_id=int(text) if text.isdigit() else text,
            sequence_start=flags[:1] in ("+", "±"),
            sequence_end=flags[:1] in ("-", "±"),
            timeout_us=timeout_us,
        )
        stream = ResponseStream(request, batch_size=rows)
        stream.timeline.queue_start = time.monotonic_ns()
        self.batcher.submit(stream)
        return stream

    def finish(self, instance: int = 0, error: bool = False) -> None:
        batch, done = self.running.pop(instance)
        for stream in batch:
            if error:
                stream.fail(InternalError("failed"))
            stream.send(InferenceResponse("m", "1"), final=True)
        done()

    async def play(self) -> list[tuple[int, list[str]]]:
        """End running executions until none is left; return all batches so far."""
        await settle()
        while self.running:
            self.finish(min(self.running))
            await settle()
        return self.batches


async def test_a_batch_has_one_request_of_each_sequence() -> None:
    instances = Instances()
    for flags in ("+1", "1", "+2", "-2", "-1"):
        instances.submit(flags)
    assert await instances.play() == [(0, ["+1", "+2"]), (0, ["1", "-2"]), (0, ["-1"])]


async def test_sequences_are_spread_over_instances_and_stay_there() -> None:
    instances = Instances(count=2)
    for flags in ("+1", "+2", "+3", "+4", "4", "3", "2", "1"):
        instances.submit(flags)
    batches = await instances.play()
    assert sorted(batches) == [
        (0, ["+1", "+3"]),
        (0, ["3", "1"]),
        (1, ["+2", "+4"]),
        (1, ["4", "2"]),
    ]


async def test_sequences_without_a_slot_wait() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    for flags in ("+2", "2"):
        instances.submit(flags)
    assert await instances.play() == [(0, ["+1"])]
    instances.submit("-1")
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"]), (0, ["+2"]), (0, ["2"])]


EXPIRED = "timeout of the corresponding sequence has been expired"


async def test_a_sequence_times_out_in_the_backlog() -> None:
    instances = Instances(size=1)
    instances.submit("+1", timeout_us=1000)
    await settle()
    waiting = [instances.submit("+2", timeout_us=3_000_000), instances.submit("2", timeout_us=1_000_000)]
    patient = instances.submit("±3")
    await settle(0.9)
    assert not any(stream.closed for stream in waiting)
    await settle(0.2)
    for stream in waiting:
        error = await error_of(stream)
        assert isinstance(error, Unavailable) and error.message == EXPIRED
        assert stream.failure is FailureReason.REJECTED
    assert "must specify the START flag" in (await error_of(instances.submit("-2"))).message
    instances.submit("-1")
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"]), (0, ["±3"])]
    assert patient.closed


async def test_a_sequence_with_a_slot_does_not_time_out() -> None:
    instances = Instances(size=1)
    instances.submit("+1", timeout_us=1000)
    late = instances.submit("-1", timeout_us=1000)
    await settle(1)
    assert not late.closed
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"])]


async def test_only_the_timed_out_sequence_of_an_id_is_rejected() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    await settle()
    gone = instances.submit("±2", "gone", timeout_us=1000)
    instances.submit("±2", "stays", timeout_us=10_000_000)
    await settle(1)
    assert (await error_of(gone)).message == EXPIRED
    instances.submit("-1")
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"]), (0, ["stays"])]


async def test_one_slot_per_instance_without_batching() -> None:
    instances = Instances(size=0, count=2)
    for flags in ("+1", "+2", "+3"):
        instances.submit(flags)
    assert await instances.play() == [(0, ["+1"]), (1, ["+2"])]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("+0", "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        ("+", "inference request to model 'm' must specify a non-zero or non-empty correlation ID"),
        (
            "3",
            "inference request for sequence 3 to model 'm' must specify the START flag on the first request of the "
            "sequence",
        ),
    ],
)
async def test_requests_without_a_sequence_are_rejected(flags: str, message: str) -> None:
    instances = Instances()
    stream = instances.submit(flags)
    error = await error_of(stream)
    assert isinstance(error, InvalidArgument) and error.message == message
    assert stream.failure is FailureReason.REJECTED
    assert await instances.play() == []


async def test_requests_with_several_rows_are_rejected() -> None:
    error = await error_of(Instances().submit("+1", rows=2))
    assert isinstance(error, InvalidArgument) and "must specify batch-size 1" in error.message


async def test_requests_after_end_need_a_new_start() -> None:
    instances = Instances()
    instances.submit("±1")
    error = await error_of(instances.submit("1"))
    assert "must specify the START flag" in error.message
    instances.submit("+1", "again")
    assert await instances.play() == [(0, ["±1"]), (0, ["again"])]


async def test_a_restarted_sequence_queues_behind_the_backlog() -> None:
    instances = Instances(size=1)
    for flags in ("+1", "-1", "+2", "-2"):
        instances.submit(flags)
    instances.submit("±1", "again")
    assert [names for _, names in await instances.play()] == [["+1"], ["-1"], ["+2"], ["-2"], ["again"]]


async def test_a_start_of_a_running_sequence_restarts_it_in_its_slot() -> None:
    instances = Instances(size=1)
    for flags in ("+1", "1", "+1", "-1", "+2"):
        instances.submit(flags)
    assert [names for _, names in await instances.play()] == [["+1"], ["1"], ["+1"], ["-1"], ["+2"]]


async def test_idle_sequences_are_removed() -> None:
    instances = Instances("max_sequence_idle_microseconds: 30000", size=1)
    instances.submit("+1")
    waiting = instances.submit("+2")
    await instances.play()
    assert not waiting.closed
    await settle(0.06)
    assert await instances.play() == [(0, ["+1"]), (0, ["+2"])]
    assert "must specify the START flag" in (await error_of(instances.submit("1"))).message


async def test_a_sequence_with_a_running_request_is_not_idle() -> None:
    instances = Instances("max_sequence_idle_microseconds: 10000")
    instances.submit("+1")
    await settle(0.03)
    instances.finish()
    instances.submit("-1")
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"])]


async def test_a_cancelled_request_cancels_the_waiting_requests_of_its_sequence() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    await settle()
    before, stream, after = (instances.submit("1") for _ in range(3))
    stream.cancel()
    for cancelled in (before, stream, after):
        assert isinstance(await error_of(cancelled), Cancelled)
    assert "must specify the START flag" in (await error_of(instances.submit("1"))).message
    instances.submit("±1", "next")
    assert await instances.play() == [(0, ["+1"]), (0, ["next"])]


async def test_a_cancelled_request_of_an_idle_sequence_frees_the_slot() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    await instances.play()
    instances.submit("1").cancel()
    instances.submit("±2")
    assert await instances.play() == [(0, ["+1"]), (0, ["±2"])]


async def test_a_cancelled_request_does_not_cancel_other_sequences_with_its_id() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    await settle()
    instances.submit("-1")
    stream, other = instances.submit("+1", "cancelled"), instances.submit("-1", "cancelled, too")
    instances.submit("±1", "next")
    other.cancel()
    assert isinstance(await error_of(stream), Cancelled)
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"]), (0, ["next"])]


async def test_the_timeout_of_a_cancelled_sequence_does_not_apply_to_the_next_one() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    await settle()
    instances.submit("±2", timeout_us=1000).cancel()
    instances.submit("±2", "next")
    await settle(0.01)
    instances.submit("-1")
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"]), (0, ["next"])]


async def test_a_cancelled_end_frees_the_slot() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    await settle()
    stream = instances.submit("-1")
    instances.submit("+2")
    stream.cancel()
    assert await instances.play() == [(0, ["+1"]), (0, ["+2"])]


async def test_a_cancelled_start_ends_the_sequence() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    await settle()
    start, second = instances.submit("+2"), instances.submit("2")
    start.cancel()
    assert isinstance(await error_of(second), Cancelled)
    assert "must specify the START flag" in (await error_of(instances.submit("2"))).message
    instances.submit("-1")
    instances.submit("±2", "again")
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"]), (0, ["again"])]


async def test_a_sequence_continues_after_an_error() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    instances.submit("-1")
    await settle()
    instances.finish(error=True)
    instances.submit("±2")
    assert await instances.play() == [(0, ["+1"]), (0, ["-1"]), (0, ["±2"])]


async def test_late_responses_block_the_sequence() -> None:
    instances = Instances()
    instances.submit("+1")
    instances.submit("-1")
    await settle()
    (stream,), done = instances.running.pop(0)
    done()
    instances.submit("±2")
    await settle()
    assert instances.batches == [(0, ["+1"]), (0, ["±2"])]
    stream.finish()
    assert (await instances.play())[2:] == [(0, ["-1"])]


async def test_direct_waits_for_its_slots_to_fill() -> None:
    instances = Instances(
        "direct { max_queue_delay_microseconds: 40000 minimum_slot_utilization: 0.5 }", size=4
    )
    instances.submit("+1")
    await settle(0.01)
    assert instances.batches == []
    instances.submit("+2")
    assert await instances.play() == [(0, ["+1", "+2"])]
    instances.submit("1")
    await settle(0.06)
    assert (await instances.play())[1:] == [(0, ["1"])]


async def test_different_shapes_are_not_batched() -> None:
    instances = Instances(size=4)
    for flags, width in (("+1", 1), ("+2", 2), ("+3", 1)):
        instances.submit(flags, width=width)
    assert await instances.play() == [(0, ["+1", "+3"]), (0, ["+2"])]


async def test_oldest_batches_its_candidate_sequences() -> None:
    instances = Instances("oldest { max_candidate_sequences: 3 }", size=2)
    for flags in ("+1", "+2", "+3", "+4", "3", "-1"):
        instances.submit(flags)
    assert await instances.play() == [(0, ["+1", "+2"]), (0, ["+3", "-1"]), (0, ["+4", "3"])]


async def test_oldest_waits_for_a_preferred_size() -> None:
    batching = "max_candidate_sequences: 8 preferred_batch_size: [3, 5] max_queue_delay_microseconds: 40000"
    instances = Instances(f"oldest {{ {batching} }}", size=8)
    for flags in ("+1", "+2"):
        instances.submit(flags)
    await settle(0.01)
    assert instances.batches == []
    for flags in ("+3", "+4"):
        instances.submit(flags)
    assert (await instances.play()) == [(0, ["+1", "+2", "+3"])]
    await settle(0.06)
    assert (await instances.play())[1:] == [(0, ["+4"])]


async def test_oldest_preserves_ordering() -> None:
    instances = Instances("oldest { max_candidate_sequences: 1 preserve_ordering: true }", count=2)
    first, second = instances.submit("+1"), instances.submit("+2")
    await settle()
    instances.finish(1)
    waiting = asyncio.ensure_future(anext(second))
    await settle()
    assert not waiting.done()
    instances.finish(0)
    assert (await anext(first)).id == "+1"
    assert (await asyncio.wait_for(waiting, 2)).id == "+2"


async def test_no_execution_after_close() -> None:
    instances = Instances(size=1)
    instances.submit("+1")
    await settle()
    left = [instances.submit("1"), instances.submit("+2")]
    assert instances.batcher.close() == left
    assert await instances.play() == [(0, ["+1"])]


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000), count=st.integers(1, 3), size=st.integers(0, 3), batching=st.integers(0, 3)
)
def test_sequences_keep_order_and_instance(seed: int, count: int, size: int, batching: int) -> None:
    strategies = (
        "",
        "direct { minimum_slot_utilization: 0.7 max_queue_delay_microseconds: 500 }",
        "oldest { max_candidate_sequences: 2 preferred_batch_size: 2 max_queue_delay_microseconds: 300 }",
        "oldest { max_candidate_sequences: 3 preserve_ordering: true }",
    )

    async def play() -> None:
        rng = random.Random(seed)
        # An idle timeout that no sequence reaches during the test, but that ends all of them after it.
        instances = Instances(f"max_sequence_idle_microseconds: 20000 {strategies[batching]}", count, size)
        streams: list[ResponseStream] = []
        for number in range(50):
            action = rng.random()
            if action < 0.6:
                flag = rng.choice(["+", "", "", "-", "±"])
                width = rng.randint(1, 2)
                streams.append(
                    instances.submit(f"{flag}{rng.randint(1, 5)}", str(number), width if size else 1)
                )
            elif action < 0.85 and instances.running:
                instances.finish(rng.choice(list(instances.running)), error=rng.random() < 0.2)
            elif streams:
                rng.choice(streams).cancel()
            if rng.random() < 0.5:
                await settle()
        while any(not stream.closed for stream in streams):
            await settle(0.001)
            if instances.running:
                instances.finish(rng.choice(list(instances.running)))
        await settle()
        requests = {stream.request.id: stream.request for stream in streams}
        where: dict[int | str, int] = {}
        last: dict[int | str, int] = {}
        sent = []
        for instance, batch in instances.batches:
            ids = [requests[name].sequence_id for name in batch]
            assert len(set(ids)) == len(ids) <= max(size, 1)
            for name in batch:
                request = requests[name]
                assert int(name) > last.get(request.sequence_id, -1)
                last[request.sequence_id] = int(name)
                if not request.sequence_start:
                    assert where[request.sequence_id] == instance
                where[request.sequence_id] = instance
                if request.sequence_end:
                    del where[request.sequence_id]
                sent.append(name)
        assert len(sent) == len(set(sent))
        for stream in streams:
            responses = [response async for response in stream]
            assert [response.final for response in responses] == [True]
            refused = isinstance(responses[0].error, InvalidArgument | Cancelled)
            assert (stream.request.id in sent) is not refused
        await settle(0.04)
        assert not instances.batcher._sequences and not instances.batcher._running
        assert not any(instances.batcher._slots.holders(index) for index in range(count))

    run_in_virtual_time(play())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 2),
    strategy=st.sampled_from(["", "oldest { max_candidate_sequences: 3 }"]),
)
def test_iterative_requests_are_rescheduled_until_final(seed: int, count: int, strategy: str) -> None:
    async def play() -> None:
        rng = random.Random(seed)
        instances = Instances("iterative_sequence: true " + strategy, count, size=3)
        expected: dict[ResponseStream, int] = {}
        executed: dict[ResponseStream, list[bool]] = {}  # whether each execution had START

        def finish(instance: int) -> None:
            batch, done = instances.running.pop(instance)
            early = rng.random() < 0.5  # the instance is free before the requests end, as with coroutines
            if early:
                done()
            for stream in batch:
                executed.setdefault(stream, []).append(stream.request.sequence_start)
                if len(executed[stream]) < expected[stream]:
                    instances.batcher.reschedule(stream)
                else:
                    stream.finish()
            if not early:
                done()

        for number in range(60):
            action = rng.random()
            if action < 0.3:
                stream = instances.submit("", str(number))
                expected[stream] = rng.randint(1, 6)
            elif action < 0.9 and instances.running:
                finish(rng.choice(list(instances.running)))
            elif expected:
                rng.choice(list(expected)).cancel()
            if rng.random() < 0.6:
                await settle()
        while any(not stream.closed for stream in expected):
            await settle()
            for instance in list(instances.running):
                finish(instance)
        for stream, times in expected.items():
            (response,) = [response async for response in stream]
            runs = executed.get(stream, [])
            assert runs == [True, *[False] * (len(runs) - 1)][: len(runs)]
            if response.error is None:
                assert len(runs) == times
            else:
                assert isinstance(response.error, Cancelled) and len(runs) < times
        for instance in list(instances.running):  # of the cancelled requests
            finish(instance)
        await settle()
        assert not instances.batcher._sequences and not instances.batcher._running

    run_in_virtual_time(play())


READY = 'control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] } } '
CORRID = 'control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } '


async def test_ready_input_aligns_requests_with_slots() -> None:
    instances = Instances(READY + CORRID, size=4)
    for flags in ("+1", "+2", "+3"):
        instances.submit(flags)
    await settle()
    instances.finish()
    for flags in ("-3", "-1"):
        instances.submit(flags)
    await settle()
    batch, _ = instances.running[0]
    assert [stream.request.id for stream in batch] == ["-1", "", "-3"]
    for name, expected in (("READY", [1, 0, 1]), ("ID", [1, 0, 3]), ("IN", [0.0, 0.0, 0.0])):
        assert [stream.request.inputs[name].array.ravel()[0] for stream in batch] == expected
    instances.finish()
    instances.submit("+4")  # takes the first free slot
    instances.submit("-2")
    assert (await instances.play())[2:] == [(0, ["+4", "-2"])]


async def test_no_padding_without_a_ready_input() -> None:
    for strategy in ("oldest { max_candidate_sequences: 4 } " + READY, CORRID):
        instances = Instances(strategy, size=4)
        for flags in ("+1", "+2", "-2"):
            instances.submit(flags)
        assert await instances.play() == [(0, ["+1", "+2"]), (0, ["-2"])]


@pytest.mark.parametrize(("concatenates", "expected"), [(True, [["1"], ["2"]]), (False, [["1", "2"]])])
async def test_different_state_shapes_are_not_concatenated(
    concatenates: bool, expected: list[list[str]]
) -> None:
    state = 'state { input_name: "S" output_name: "NEXT" data_type: TYPE_FP32 dims: [ -1 ] }'
    instances = Instances(state, concatenates=concatenates)
    for flags in ("+1", "+2"):
        instances.submit(flags)
    await settle()
    batch, done = instances.running.pop(0)
    for stream, length in zip(batch, (1, 3), strict=True):
        outputs = [Tensor.from_numpy("NEXT", np.zeros((1, length), np.float32))]
        instances.batcher.observe(stream, InferenceResponse("m", "1", outputs=outputs))
        stream.finish()
    done()
    for flags in ("1", "2"):
        instances.submit(flags)
    assert [ids for _, ids in await instances.play()][1:] == expected
