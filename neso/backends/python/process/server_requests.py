"""Server side of calls from a model in a child process: BLS requests, model loading, metrics."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from neso.backends.python.local_server import LocalServer, ModelCall
from neso.backends.python.process.codec import pack_error, payload_size
from neso.backends.python.process.messages import (
    Call,
    CallResponse,
    CancelCall,
    DropHandle,
    Message,
    Query,
    Reply,
    TakenOfCall,
)
from neso.backends.python.process.model_process import ModelProcess
from neso.server.errors import InternalError, ServerError
from neso.server.inference_response import InferenceResponse
from neso.server.metrics.custom import CustomFamily, CustomMetric
from neso.server.tracing import ModelTrace

Object = TypeVar("Object")


class ServerRequestHandler:
    """Executes the calls of one child process, on the core's event loop.

    Metric families and metrics are kept until the child drops them or ends.
    """

    def __init__(
        self, server: LocalServer, process: ModelProcess, find_trace: Callable[[int], ModelTrace | None]
    ) -> None:
        self._server = server
        self._find_trace = find_trace
        self._process = process
        self._handles = itertools.count()
        self._families: dict[int, CustomFamily] = {}
        self._metrics: dict[int, CustomMetric] = {}
        self._calls: dict[int, ModelCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods: dict[str, Callable[..., Any]] = {
            "load_model": self._server.core.load_model,
            "unload_model": self._server.core.unload_model,
            "model_ready": self._server.core.check_model_ready,
            "metric_family": lambda *arguments: self._store(
                self._families, self._server.metric_family(*arguments)
            ),
            "metric": lambda family, *arguments: self._store(
                self._metrics, self._families[family].metric(*arguments)
            ),
            **{
                name: lambda metric, *arguments, name=name: getattr(self._metrics[metric], name)(*arguments)
                for name in ("increment", "set", "observe", "value")
            },
        }

    def handle(self, message: Message) -> None:
        match message:
            case Call():
                self._call(message)
            case CancelCall(number):
                if (call := self._calls.get(number)) is not None:
                    call.cancel()
            case TakenOfCall(number, size):
                if (call := self._calls.get(number)) is not None:
                    call.taken(size)
            case Query():
                self._query(message)
            case DropHandle(handle):
                self._families.pop(handle, None)
                self._metrics.pop(handle, None)

    def close(self) -> None:
        """Cancel calls and drop metrics after the process has ended."""
        for call in self._calls.values():
            call.cancel()
        self._calls.clear()
        self._families.clear()
        self._metrics.clear()

    def _call(self, message: Call) -> None:
        def deliver(response: InferenceResponse) -> None:
            if response.final:
                self._calls.pop(message.call, None)

            def pack(response: InferenceResponse) -> CallResponse:
                return CallResponse(message.call, self._process.codec.pack_response(response), size)

            def failed(error: Exception) -> None:
                failure = InferenceResponse("", "", error=InternalError(str(error)), final=response.final)
                self._process.send(pack(failure))

            size = response.backlog_size
            self._process.send_tensors(
                lambda: pack(response),
                payload_size(response.outputs),
                failed,
            )

        request = self._process.codec.unpack_request(message.request)
        if message.request.trace is not None:
            request.trace = self._find_trace(message.request.trace.id)
        self._calls[message.call] = call = ModelCall(self._server, request, message.decoupled, deliver)
        call.start()

    def _query(self, message: Query) -> None:
        try:
            result = self._methods[message.method](*message.arguments)
        except ServerError as error:
            self._process.send(Reply(message.query, error=pack_error(error)))
            return
        if not isinstance(result, Awaitable):
            self._process.send(Reply(message.query, result))
            return
        task = asyncio.ensure_future(self._reply_later(message.query, result))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply_later(self, query: int, result: Awaitable[Any]) -> None:
        try:
            reply = Reply(query, await result)
        except ServerError as error:
            reply = Reply(query, error=pack_error(error))
        except Exception as error:
            reply = Reply(query, error=pack_error(InternalError(f"{type(error).__name__}: {error}")))
        self._process.send(reply)

    def _store(self, objects: dict[int, Object], object_: Object) -> int:
        """Store an object and return its handle."""
        handle = next(self._handles)
        objects[handle] = object_
        return handle
