"""Cancelled requests get a response and leave no tasks behind."""

from __future__ import annotations

import asyncio

from neso.server.backend import RequestTasks
from neso.server.errors import Cancelled
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream


def new_stream() -> ResponseStream:
    return ResponseStream(InferenceRequest("model", {}))


async def only_response(stream: ResponseStream) -> InferenceResponse:
    (response,) = [response async for response in stream]
    return response


async def work(stream: ResponseStream, begun: asyncio.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


def test_cancel_before_the_task_starts():
    async def run() -> None:
        tasks, stream, begun = RequestTasks(), new_stream(), asyncio.Event()
        tasks.start(stream, work(stream, begun))
        stream.cancel()
        response = await asyncio.wait_for(only_response(stream), 60)
        assert isinstance(response.error, Cancelled) and not begun.is_set()

    asyncio.run(run())


def test_submit_after_cancel():
    async def run() -> None:
        tasks, stream = RequestTasks(), new_stream()
        stream.cancel()
        tasks.start(stream, work(stream, asyncio.Event()))
        assert isinstance((await asyncio.wait_for(only_response(stream), 60)).error, Cancelled)

    asyncio.run(run())


def test_end_cancels_all_tasks():
    async def run() -> None:
        tasks, stream, begun = RequestTasks(), new_stream(), asyncio.Event()
        task = tasks.start(stream, work(stream, begun))
        await begun.wait()
        await asyncio.wait_for(tasks.end(), 60)
        assert task.cancelled() and stream.closed
        assert isinstance((await only_response(stream)).error, Cancelled)

    asyncio.run(run())
