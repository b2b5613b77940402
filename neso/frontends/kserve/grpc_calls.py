"""RPCs in flight. Each RPC ends with a status, also when the server stops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from neso.frontends.kserve.errors import as_server_error
from neso.frontends.kserve.grpc_codec import GRPC_STATUSES

STOPPING = "the server is shutting down"

Servicer = TypeVar("Servicer", bound="HasActiveCalls")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
Method = Callable[[Servicer, Request, grpc.aio.ServicerContext], Coroutine[Any, Any, Reply]]


class HasActiveCalls(Protocol):
    calls: ActiveCalls


class PendingCall(Protocol):
    """A call in flight that has no task."""

    def abort(self) -> None:
        """End the call with UNAVAILABLE."""


class ActiveCalls:
    """RPCs in flight: tasks, calls without a task, and callbacks that end streams when the server stops."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._aborted: set[asyncio.Task[Any]] = set()
        self._pending: set[PendingCall] = set()
        self._none_pending: asyncio.Event | None = None  # exists while the server stops
        self._stop_callbacks: set[Callable[[], None]] = set()
        self._stopping = False

    def on_stop(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the server begins to stop; immediately if it already has."""
        self._stop_callbacks.add(callback)
        if self._stopping:
            callback()

    def remove_on_stop(self, callback: Callable[[], None]) -> None:
        """Undo `on_stop`."""
        self._stop_callbacks.discard(callback)

    def add_pending(self, call: PendingCall) -> None:
        """Register a call that has no task."""
        self._pending.add(call)

    def remove_pending(self, call: PendingCall) -> None:
        """Undo `add_pending`. Idempotent."""
        self._pending.discard(call)
        if self._none_pending is not None and not self._pending:
            self._none_pending.set()

    async def stop(self, grace: float) -> None:
        """Wait up to `grace` seconds for RPCs in flight, then end the rest with UNAVAILABLE."""
        self._stopping = True
        for callback in list(self._stop_callbacks):
            callback()
        end = time.monotonic() + grace
        while (self._pending or self._tasks) and (remaining := end - time.monotonic()) > 0:
            if self._pending:
                self._none_pending = asyncio.Event()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._none_pending.wait(), remaining)
            else:
                await asyncio.wait(self._tasks, timeout=remaining)
        for call in list(self._pending):
            call.abort()
        if self._tasks:
            self._aborted = set(self._tasks)
            for task in self._aborted:
                task.cancel()
            await asyncio.wait(self._aborted, timeout=1)

    async def run(
        self, name: str, context: grpc.aio.ServicerContext, coroutine: Coroutine[Any, Any, Reply]
    ) -> Reply:
        """Run an RPC's coroutine and return its result. Errors become the status of the RPC."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await coroutine
        except asyncio.CancelledError:
            if task not in self._aborted:
                raise  # cancelled by the client: the transport has set the status
            await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
            raise  # not reached: abort raises
        except grpc.aio.AbortError:
            raise
        except Exception as failure:
            await context.abort(*_status(failure, name))
            raise  # not reached
        finally:
            self._tasks.discard(task)
            self._aborted.discard(task)
            del task  # a cancelled task refers to this frame


def _status(failure: Exception, name: str) -> tuple[grpc.StatusCode, str]:
    """Return the status for an exception. A variable in `ActiveCalls.run` would be part of a reference cycle."""
    error = as_server_error(failure, name)
    return GRPC_STATUSES[error.code], error.message


def rpc(method: Method[Servicer, Request, Reply]) -> Method[Servicer, Request, Reply]:
    """Decorate a servicer's method so that it runs in the servicer's `calls`."""

    @functools.wraps(method)
    async def run(self: Servicer, request: Request, context: grpc.aio.ServicerContext) -> Reply:
        return await self.calls.run(method.__name__, context, method(self, request, context))

    return run


def text_metadata(context: grpc.aio.ServicerContext) -> Iterator[tuple[str, str]]:
    """Yield keys and values of the client's metadata, without binary values."""
    for key, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            yield key, value
