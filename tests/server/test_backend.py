"""Tasks of a backend's requests, and the import of backends."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from neso.server.backend import RequestTasks
from neso.server.errors import Cancelled, InternalError
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


def test_task_that_raises_fails_its_request():
    async def fail() -> None:
        raise ValueError("broken")

    async def run() -> None:
        tasks, stream = RequestTasks(), new_stream()
        tasks.start(stream, fail())
        response = await asyncio.wait_for(only_response(stream), 60)
        assert isinstance(response.error, InternalError) and "broken" in response.error.message

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


FIND_AT_ONCE = """
import sys, threading, time
import numpy
import neso.generation
from neso.server.backend import find_backend

class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "neso.backends.llm":  # whose lock is held meanwhile, and which the other backend needs
            searching.set()
            time.sleep(2)

def find(name):
    try:
        find_backend(name)
    except BaseException as error:
        failed.append(f"{name}: {error!r}")

sys.meta_path.insert(0, Slow)
searching, failed = threading.Event(), []
first = threading.Thread(target=find, args=("llm",))
first.start()
searching.wait()
find("embedding")
first.join()
sys.exit(chr(10).join(failed) or 0)
"""


def test_backends_with_mutual_imports() -> None:
    """In separate processes, since imports cannot be undone."""
    for _ in range(3):
        found = subprocess.run(
            [sys.executable, "-c", FIND_AT_ONCE], capture_output=True, text=True, timeout=60
        )
        assert found.returncode == 0, found.stderr
