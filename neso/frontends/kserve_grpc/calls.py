"""The RPCs in flight: each ends with a status, whatever happens to it or to the server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from neso.frontends.kserve_grpc.errors import STATUS, as_server_error

STOPPING = "the server is shutting down"

Servicer = TypeVar("Servicer", bound="HasCalls")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Method = Callable[[Servicer, Request, grpc.aio.ServicerContext], Coroutine[Any, Any, Reply]]


class HasCalls(Protocol):
    calls: Calls


class Evictable(Protocol):
    """A call that waits for its response without a task."""

    def evict(self) -> None:
        """End it with UNAVAILABLE."""


class Calls:
    """Knows the tasks that answer RPCs, the calls that wait without one, and which streams to tell when the server
    begins to stop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._evicted: set[asyncio.Task[Any]] = set()
        self._waiting: set[Evictable] = set()
        self._none_waits: asyncio.Event | None = None  # set then; there is one while the server stops
        self._drains: set[Callable[[], None]] = set()
        self.stopping = False

    def on_stop(self, drain: Callable[[], None]) -> None:
        """Call `drain` when the server begins to stop; at once if it has."""
        self._drains.add(drain)
        if self.stopping:
            drain()

    def forget(self, drain: Callable[[], None]) -> None:
        """Undo `on_stop`."""
        self._drains.discard(drain)

    def begin_waiting(self, call: Evictable) -> None:
        """A call begins to wait for its response, without a task."""
        self._waiting.add(call)

    def end_waiting(self, call: Evictable) -> None:
        """It has ended."""
        self._waiting.discard(call)
        if self._none_waits is not None and not self._waiting:
            self._none_waits.set()

    async def finish(self, grace: float) -> None:
        """Let RPCs end by themselves for `grace` seconds, then end those that are left with UNAVAILABLE."""
        self.stopping = True
        for drain in list(self._drains):
            drain()
        end = time.monotonic() + grace
        while (self._waiting or self._tasks) and (left := end - time.monotonic()) > 0:
            if self._waiting:
                self._none_waits = asyncio.Event()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._none_waits.wait(), left)
            else:
                await asyncio.wait(self._tasks, timeout=left)
        for call in list(self._waiting):
            call.evict()
        if self._tasks:
            self._evicted = set(self._tasks)
            for task in self._evicted:
                task.cancel()
            await asyncio.wait(self._evicted, timeout=1)

    async def answer(
        self, name: str, context: grpc.aio.ServicerContext, coroutine: Coroutine[Any, Any, Reply]
    ) -> Reply:
        """The coroutine's result; its errors become the status of the RPC."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        except asyncio.CancelledError:
            if task not in self._evicted:
                raise  # by the client: gRPC has set the status
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
            raise  # not reached: abort raises
        except grpc.aio.AbortError:
            raise
        except Exception as failure:
            error = as_server_error(failure, name)
            await context.abort(STATUS[error.code], error.message)
            raise  # not reached
        finally:
            self._tasks.discard(task)
            self._evicted.discard(task)


def metadata_texts(context: grpc.aio.ServicerContext) -> Iterator[tuple[str, str]]:
    """Key and value of the client's metadata; binary values are left out."""
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            yield key, value


def rpc(method: Method[Servicer, Request, Reply]) -> Method[Servicer, Request, Reply]:
    """Mark a servicer's method as one that answers an RPC under its `calls`."""

    @functools.wraps(method)
    async def answering(self: Servicer, request: Request, context: grpc.aio.ServicerContext) -> Reply:
        return await self.calls.answer(method.__name__, context, method(self, request, context))

    return answering
