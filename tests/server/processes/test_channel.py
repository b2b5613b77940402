"""Channel: calls in both directions, streams with flow control, cancellation and the end of the other process."""

from __future__ import annotations

import asyncio
import socket

import pytest
from eventually import until

from neso.server.errors import NotFound, Overloaded, Unavailable
from neso.server.processes.channel import Channel


class Ends:
    """Both ends of a channel; `there` has the operations of the test."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.produced = 0

    async def open(self) -> Ends:
        ours, theirs = socket.socketpair()
        operations = {
            "add": lambda a, b: a + b,
            "missing": self._missing,
            "overloaded": self._overloaded,
            "wait": self._wait,
            "count": self._count,
        }
        self.here = await Channel.open(ours, {}, lambda message: None, self.lost.set)
        self.there = await Channel.open(theirs, operations, lambda message: None, lambda: None)
        return self

    def _missing(self) -> None:
        raise NotFound("no such thing")

    async def _overloaded(self) -> None:
        raise Overloaded("too much")

    async def _wait(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def _count(self, number: int):
        try:
            for value in range(number):
                self.produced += 1
                yield value
                await asyncio.sleep(0)
        finally:
            self.cancelled.set()


@pytest.fixture
async def ends():
    both = await Ends().open()
    yield both
    both.here.close()
    both.there.close()


async def test_a_call_returns_the_result(ends):
    assert await ends.here.call("add", 1, 2) == 3
    assert await asyncio.gather(*(ends.here.call("add", n, n) for n in range(50))) == [
        2 * n for n in range(50)
    ]


async def test_large_values_arrive_whole(ends):
    assert len(await ends.here.call("add", b"x" * 3_000_000, b"y")) == 3_000_001


async def test_errors_keep_class_and_message(ends):
    with pytest.raises(NotFound, match="no such thing"):
        await ends.here.call("missing")
    with pytest.raises(Overloaded, match="too much"):
        await ends.here.call("overloaded")


async def test_an_unexpected_error_is_internal_and_the_channel_continues(ends):
    with pytest.raises(Exception, match="TypeError"):
        await ends.here.call("add", 1, "2")
    assert await ends.here.call("add", 1, 2) == 3


async def test_cancelling_a_call_cancels_the_operation(ends):
    call = asyncio.ensure_future(ends.here.call("wait"))
    await ends.here.call("add", 1, 1)
    call.cancel()
    await asyncio.wait_for(ends.cancelled.wait(), 60)


async def test_a_stream_yields_all_items_in_order(ends):
    assert [item async for item in ends.here.stream("count", 1000)] == list(range(1000))


async def test_a_slow_consumer_pauses_the_producer(ends):
    stream = ends.here.stream("count", 10_000)
    assert await anext(stream) == 0
    await until(lambda: ends.produced > 60)
    for _ in range(200):
        await asyncio.sleep(0)
    assert ends.produced < 1000
    assert [item async for item in stream] == list(range(1, 10_000))


async def test_closing_a_stream_ends_the_operation(ends):
    stream = ends.here.stream("count", 10_000)
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(ends.cancelled.wait(), 60)


async def test_calls_in_flight_fail_when_the_other_process_ends(ends):
    call = asyncio.ensure_future(ends.here.call("wait"))
    await ends.here.call("add", 1, 1)
    ends.there.close()
    with pytest.raises(Unavailable):
        await call
    await asyncio.wait_for(ends.lost.wait(), 60)
    with pytest.raises(Unavailable):
        await ends.here.call("add", 1, 1)
