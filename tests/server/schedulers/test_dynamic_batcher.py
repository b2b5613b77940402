"""The dynamic batcher with a backend whose executions end when the test decides."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from event_loop import error_of, settle
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc.model_config_pb2 import ModelConfig
from virtual_time import run_in_virtual_time

from neso.server.errors import Cancelled, Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.schedulers.dynamic_batcher import DynamicBatcher
from neso.server.signature import Signature
from neso.server.statistics import FailureReason
from neso.server.tensor import Tensor

pytestmark = pytest.mark.usefixtures("virtual_time")

TENSORS = """
name: "m" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""


class Instances:
    """Records the batches and ends them one by one."""

    def __init__(self, batching: str = "", count: int = 1, tensors: str = TENSORS) -> None:
        config = ModelConfig()
        text_format.Parse(f"{tensors} dynamic_batching {{ {batching} }}", config)
        self.signature = Signature(config)
        self.running: list[tuple[list[ResponseStream], Callable[[], None]]] = []
        self.batches: list[list[str]] = []
        self.batcher = DynamicBatcher(config, self.signature, self.execute, count)

    def execute(
        self, batch: list[ResponseStream], done: Callable[[], None], instance: int | None = None
    ) -> None:
        for stream in batch:
            assert not stream.closed
            stream.timeline.compute_start = 1
        self.running.append((batch, done))
        self.batches.append([stream.request.id for stream in batch])

    def submit(self, name: str, rows: int = 1, width: int = 2, **options: Any) -> ResponseStream:
        tensor = Tensor.from_numpy("IN", np.zeros((rows, width), np.float32))
        request = InferenceRequest("m", {"IN": tensor}, id=name, **options)
        stream = ResponseStream(request, batch_size=self.signature.check(request))
        stream.timeline.queue_start = time.monotonic_ns()
        self.batcher.submit(stream)
        return stream

    def finish(self, index: int = 0) -> None:
        batch, done = self.running.pop(index)
        for stream in batch:
            stream.send(InferenceResponse("m", "1"), final=True)
        done()


async def test_concurrent_requests_are_batched() -> None:
    instances = Instances()
    for name in "abc":
        instances.submit(name)
    await settle()
    assert instances.batches == [["a", "b", "c"]]


async def test_requests_during_an_execution_form_the_next_batch() -> None:
    instances = Instances()
    instances.submit("a")
    await settle()
    for name in "bcd":
        instances.submit(name)
    await settle()
    assert instances.batches == [["a"]]
    instances.finish()
    await settle()
    assert instances.batches == [["a"], ["b", "c", "d"]]


async def test_batches_respect_the_maximum_size() -> None:
    instances = Instances(count=3)
    for name, rows in (("a", 3), ("b", 4), ("c", 2), ("d", 8)):
        instances.submit(name, rows)
    await settle()
    assert instances.batches == [["a", "b"], ["c"], ["d"]]


async def test_preferred_batch_sizes() -> None:
    instances = Instances("preferred_batch_size: [2, 4]", count=3)
    for name in "abcdefg":
        instances.submit(name)
    await settle()
    assert instances.batches == [["a", "b", "c", "d"], ["e", "f"], ["g"]]


async def test_queue_delay() -> None:
    instances = Instances("max_queue_delay_microseconds: 30000 preferred_batch_size: 4")
    instances.submit("a")
    await settle(0.01)
    assert instances.batches == []
    instances.submit("b")
    await settle(0.04)
    assert instances.batches == [["a", "b"]]


async def test_a_full_batch_does_not_wait() -> None:
    instances = Instances("max_queue_delay_microseconds: 10000000 preferred_batch_size: 4")
    for name in "abcd":
        instances.submit(name)
    await settle()
    assert instances.batches == [["a", "b", "c", "d"]]


DELAYED = "max_queue_delay_microseconds: 10000000 preferred_batch_size: [2, 6]"


@pytest.mark.parametrize("rows", [[2], [6], [7], [1, 1], [1, 5], [3, 3]])
async def test_a_batch_of_preferred_or_larger_size_does_not_wait(rows: list[int]) -> None:
    instances = Instances(DELAYED)
    for number in rows:
        instances.submit(str(number), number)
    await settle()
    assert instances.batches == [[str(number) for number in rows]]


async def test_the_rest_of_a_preferred_batch_waits() -> None:
    instances = Instances(DELAYED, count=2)
    for name in "abc":
        instances.submit(name)
    await settle()
    assert instances.batches == [["a", "b"]]
    await settle(10)
    assert instances.batches == [["a", "b"], ["c"]]


async def test_a_batch_does_not_wait_if_the_next_request_exceeds_the_largest_preferred_size() -> None:
    instances = Instances(DELAYED, count=2)
    instances.submit("a", 3)
    await settle(1)
    assert instances.batches == []
    instances.submit("b", 4)
    await settle(1)
    assert instances.batches == [["a"]]
    await settle(9)
    assert instances.batches == [["a"], ["b"]]


async def test_after_the_delay_a_batch_has_all_requests_that_fit() -> None:
    instances = Instances(DELAYED)
    instances.submit("running", 6)
    await settle()
    for name, rows in (("a", 3), ("b", 4), ("c", 1), ("d", 1)):
        instances.submit(name, rows)
    await settle(11)
    instances.finish()
    await settle()
    assert instances.batches == [["running"], ["a", "b", "c"]]


async def test_different_shapes_are_not_batched() -> None:
    instances = Instances(count=4)
    for name, width in (("a", 2), ("b", 2), ("c", 3), ("d", 2)):
        instances.submit(name, width=width)
    await settle()
    assert instances.batches == [["a", "b"], ["c"], ["d"]]


async def test_ragged_inputs_are_batched() -> None:
    instances = Instances(
        tensors=TENSORS.replace("dims: [ -1 ] }", "dims: [ -1 ] allow_ragged_batch: true }", 1)
    )
    for name, width in (("a", 2), ("b", 3)):
        instances.submit(name, width=width)
    await settle()
    assert instances.batches == [["a", "b"]]


async def test_high_priority_requests_run_first() -> None:
    instances = Instances("priority_levels: 3 default_priority_level: 2")
    instances.submit("first")
    await settle()
    for name, priority in (("low", 3), ("default", 0), ("high", 1), ("high too", 1)):
        instances.submit(name, rows=4, priority=priority)
    for _ in range(3):
        instances.finish()
        await settle()
    assert instances.batches[1:] == [["high", "high too"], ["default", "low"]]


async def test_unknown_priorities_use_the_default() -> None:
    instances = Instances("priority_levels: 3 default_priority_level: 2")
    instances.submit("running")
    await settle()
    for name, priority in (("third", 3), ("none", 7), ("first", 1)):
        instances.submit(name, priority=priority)
    instances.finish()
    await settle()
    assert instances.batches == [["running"], ["first", "none", "third"]]


async def test_levels_without_requests_take_no_memory() -> None:
    instances = Instances(f"priority_levels: {2**64 - 1} default_priority_level: {2**32}")
    instances.submit("running")
    await settle()
    for name, priority in (("last", 2**64 - 1), ("default", 0), ("first", 1)):
        instances.submit(name, priority=priority)
    instances.finish()
    await settle()
    assert instances.batches == [["running"], ["first", "default", "last"]]


async def test_a_full_queue_rejects_requests() -> None:
    instances = Instances("default_queue_policy { max_queue_size: 2 }")
    instances.submit("running")
    await settle()
    instances.submit("a")
    instances.submit("b")
    stream = instances.submit("c")
    error = await error_of(stream)
    assert isinstance(error, Unavailable) and "Exceeds maximum queue size" in error.message
    assert stream.failure is FailureReason.REJECTED
    instances.finish()
    await settle()
    assert instances.batches == [["running"], ["a", "b"]]


async def test_queue_timeout_rejects() -> None:
    instances = Instances("default_queue_policy { default_timeout_microseconds: 20000 }")
    instances.submit("running")
    await settle()
    stream = instances.submit("late")
    error = await error_of(stream)
    assert isinstance(error, Unavailable) and error.message == "Request timeout expired"
    instances.finish()
    await settle()
    assert instances.batches == [["running"]]


async def test_queue_timeout_delays() -> None:
    instances = Instances(
        "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 20000 }"
    )
    instances.submit("running")
    await settle()
    instances.submit("late", rows=8)
    await settle(0.03)
    instances.submit("punctual", rows=8)
    for _ in range(2):
        instances.finish()
        await settle()
    assert instances.batches == [["running"], ["punctual"], ["late"]]


@pytest.mark.parametrize(
    ("overridable", "requested", "refused"),
    [("true", 10_000, True), ("true", 10**9, False), ("false", 10_000, False)],
)
async def test_request_timeout_override(overridable: str, requested: int, refused: bool) -> None:
    instances = Instances(
        f"default_queue_policy {{ default_timeout_microseconds: 5000000 allow_timeout_override: {overridable} }}"
    )
    instances.submit("running")
    await settle()
    stream = instances.submit("a", timeout_us=requested)
    await settle(0.03)
    assert stream.closed is refused
    instances.batcher.close()


async def test_a_cancelled_request_leaves_the_queue() -> None:
    instances = Instances()
    instances.submit("running")
    await settle()
    stream = instances.submit("gone")
    instances.submit("stays")
    stream.cancel()
    assert isinstance(await error_of(stream), Cancelled)
    instances.finish()
    await settle()
    assert instances.batches == [["running"], ["stays"]]


async def test_preserve_ordering() -> None:
    instances = Instances("preserve_ordering: true", count=2)
    first, second = instances.submit("a", rows=8), instances.submit("b", rows=8)
    await settle()
    instances.finish(1)
    await settle()
    waiting = asyncio.ensure_future(anext(second))
    await settle()
    assert not waiting.done()
    instances.finish(0)
    assert (await anext(first)).id == "a"
    assert (await asyncio.wait_for(waiting, 2)).id == "b"


async def test_delayed_requests_keep_their_priority() -> None:
    instances = Instances(
        "priority_levels: 2 default_priority_level: 2 priority_queue_policy { key: 1 value { "
        "timeout_action: DELAY default_timeout_microseconds: 100000 } }"
    )
    instances.submit("running")
    await settle()
    instances.submit("low", rows=8)
    instances.submit("late", rows=8, priority=1)
    await settle(0.15)
    instances.submit("punctual", rows=8, priority=1)
    for _ in range(3):
        instances.finish()
        await settle()
    assert instances.batches == [["running"], ["punctual"], ["late"], ["low"]]


async def test_closed_requests_do_not_count_against_the_queue_size() -> None:
    instances = Instances("default_queue_policy { max_queue_size: 2 }")
    instances.submit("running")
    await settle()
    gone = [instances.submit(name) for name in "ab"]
    for stream in gone:
        stream.cancel()
    for name in "cd":
        assert not instances.submit(name).closed
    assert isinstance(await error_of(instances.submit("e")), Unavailable)
    instances.finish()
    await settle()
    assert instances.batches == [["running"], ["c", "d"]]


async def test_queue_delay_counts_from_the_oldest_request() -> None:
    instances = Instances("max_queue_delay_microseconds: 400000 priority_levels: 2 default_priority_level: 2")
    instances.submit("old")
    await settle(0.25)
    instances.submit("new", priority=1)
    await settle(0.25)
    assert instances.batches == [["new", "old"]]


async def test_preserve_ordering_of_decoupled_models() -> None:
    instances = Instances("preserve_ordering: true", count=2)
    first, second = instances.submit("a", rows=8), instances.submit("b", rows=8)
    gone = instances.submit("c")
    third = instances.submit("d")
    gone.cancel()
    await settle()
    for number in range(2):
        second.send(InferenceResponse("m", "1", id=f"b{number}"))
    waiting = asyncio.ensure_future(anext(second))
    await settle()
    assert not waiting.done()
    first.send(InferenceResponse("m", "1", id="a0"))
    assert (await anext(first)).id == "a0"  # the first request streams
    instances.finish()
    await settle()
    assert [(await asyncio.wait_for(waiting, 2)).id, (await anext(second)).id] == ["b0", "b1"]
    instances.finish()
    await settle()
    third.send(InferenceResponse("m", "1", id="d0"))
    assert (await asyncio.wait_for(anext(third), 2)).id == "d0"


async def test_requests_cancelled_before_submission_do_not_block_others() -> None:
    instances = Instances("preserve_ordering: true")
    request = InferenceRequest("m", {"IN": Tensor.from_numpy("IN", np.zeros((1, 2), np.float32))})
    request.cancel()
    instances.batcher.submit(ResponseStream(request))
    stream = instances.submit("a")
    await settle()
    stream.send(InferenceResponse("m", "1", id="a0"))
    assert (await asyncio.wait_for(anext(stream), 2)).id == "a0"


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 3), ordered=st.booleans(), preferred=st.booleans())
def test_every_request_has_exactly_one_final_response(
    seed: int, count: int, ordered: bool, preferred: bool
) -> None:
    async def play() -> None:
        rng = random.Random(seed)
        batching = "priority_levels: 2 default_priority_level: 2 "
        batching += "preserve_ordering: true " if ordered else ""
        batching += "preferred_batch_size: [3, 5] " if preferred else ""
        instances = Instances(batching, count)
        streams = []
        for number in range(40):
            action = rng.random()
            if action < 0.6:
                options = {
                    "rows": rng.randint(1, 8),
                    "width": rng.randint(1, 2),
                    "priority": rng.randint(0, 2),
                }
                streams.append(instances.submit(str(number), **options))
            elif action < 0.8 and instances.running:
                instances.finish(rng.randrange(len(instances.running)))
            elif streams:
                rng.choice(streams).cancel()
            assert len(instances.running) <= count
            if rng.random() < 0.5:
                await settle()
        while any(not stream.closed for stream in streams):
            await settle()
            if instances.running:
                instances.finish()
        for stream in streams:
            responses = [response async for response in stream]
            assert [response.final for response in responses] == [True]
            executed = sum(stream.request.id in batch for batch in instances.batches)
            assert executed == (responses[0].error is None)

    run_in_virtual_time(play())
