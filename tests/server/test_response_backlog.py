"""Responses that a slow client does not take: producers wait, requests of others are cancelled."""

from __future__ import annotations

import asyncio
import threading
import weakref

import numpy as np
import pytest
from eventually import standstill, until

from neso.server.backlog import OVERFLOW_FACTOR, Backlog
from neso.server.errors import Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.tensor import DataType, Tensor

LIMIT = 10_000


def new_stream(request: InferenceRequest | None = None) -> ResponseStream:
    return ResponseStream(request or InferenceRequest("model", {}), backlog=Backlog(LIMIT))


def response(size: int = 1000) -> InferenceResponse:
    return InferenceResponse("model", "1", outputs=[Tensor("T", DataType.UINT8, np.zeros(size, np.uint8))])


def test_sizes_count_the_memory_of_tensors() -> None:
    assert 5000 <= response(5000).size < 7000
    text = InferenceResponse("model", "1", outputs=[Tensor.from_strings("T", ["x" * 3000, "y" * 2000])])
    assert 5000 <= text.size < 7000


def test_stream_does_not_keep_the_consumer_of_an_ended_request() -> None:
    stream, received = new_stream(), []

    def consumer(response: InferenceResponse) -> None:
        received.append(response)

    reference = weakref.ref(consumer)
    stream.finish()
    stream.consume(consumer)
    del consumer
    assert len(received) == 1
    assert reference() is None


async def test_coroutine_waits_until_responses_are_taken() -> None:
    stream, sent = new_stream(), 0

    async def produce() -> None:
        nonlocal sent
        for _ in range(100):
            assert stream.backlog is not None
            await stream.backlog.wait()
            stream.send(response())
            sent += 1
        stream.finish()

    producer = asyncio.create_task(produce())
    assert await standstill(lambda: sent, 100) < 20
    responses = [each async for each in stream]
    await producer
    assert len(responses) == 101 and responses[-1].final


async def test_thread_waits_until_responses_are_taken() -> None:
    stream, loop, sent = new_stream(), asyncio.get_running_loop(), 0

    def produce() -> None:
        nonlocal sent
        for _ in range(100):
            each = response()
            stream.admit(each)
            loop.call_soon_threadsafe(stream.send, each)
            sent += 1
        loop.call_soon_threadsafe(stream.finish)

    thread = threading.Thread(target=produce)
    thread.start()
    await until(lambda: sent)
    assert await standstill(lambda: sent, 100) < 20
    assert len([each async for each in stream]) == 101
    await asyncio.to_thread(thread.join)


@pytest.mark.parametrize("end", ["cancel", "finish"])
async def test_waiting_thread_continues_when_the_request_ends(end: str) -> None:
    stream, loop, sent = new_stream(), asyncio.get_running_loop(), 0

    def produce() -> None:
        nonlocal sent
        for _ in range(1000):
            each = response()
            stream.admit(each)
            loop.call_soon_threadsafe(stream.send, each)
            sent += 1

    thread = threading.Thread(target=produce)
    thread.start()
    await until(lambda: stream.congested)
    getattr(stream, end)()
    await asyncio.to_thread(thread.join, 60)
    assert sent == 1000
    stream.finish()
    assert len([each async for each in stream]) < 30  # the others are dropped


async def test_request_is_cancelled_when_its_producer_does_not_wait() -> None:
    stream = new_stream()
    cancelled: list[bool] = []
    stream.request.on_cancel(lambda: cancelled.append(stream.closed))
    sent = 0
    while not stream.closed:
        stream.send(response())
        sent += 1
    assert cancelled == [True] and stream.request.cancelled
    assert sent * 1000 < (OVERFLOW_FACTOR + 1) * LIMIT
    responses = [each async for each in stream]
    assert isinstance(responses[-1].error, Unavailable) and responses[-1].final


async def test_responses_larger_than_the_limit_pass() -> None:
    stream = new_stream()
    stream.send(response(100 * LIMIT))
    stream.finish()
    assert [each.error for each in [each async for each in stream]] == [None, None]


async def test_responses_to_a_fast_consumer_are_not_counted() -> None:
    stream = new_stream()
    assert stream.backlog is not None
    received = 0

    async def consume() -> None:
        nonlocal received
        async for _ in stream:
            received += 1

    consumer = asyncio.create_task(consume())
    for number in range(1000):
        await until(lambda number=number: received == number)
        stream.send(response())
        assert not stream.congested
    stream.finish()
    await consumer


async def test_step_of_a_request_waits_for_the_client_of_the_request() -> None:
    parent = new_stream()
    step = ResponseStream(InferenceRequest("step", {}, backlog=parent.backlog), backlog=parent.backlog)
    step.consume(lambda each: parent.send(response()) if not each.final else None)
    while not step.congested:
        step.send(response())
    step.finish()
    assert parent.congested  # the end of the step does not end the parent's backlog
    parent.cancel()
    assert not step.congested
