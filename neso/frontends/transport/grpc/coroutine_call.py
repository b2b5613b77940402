"""Calls whose handler is a coroutine or an async generator."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from neso.frontends.transport.grpc.call import Call, logger
from neso.frontends.transport.grpc.wire_format import OK_TRAILERS, CallHeaders, MessageError, Metadata
from neso.frontends.transport.http2 import Http2Stream

if TYPE_CHECKING:
    from neso.frontends.transport.grpc.server import GrpcServerOptions

_MAX_UNREAD = 1 << 20  # bytes of a streaming request; above this, the client's window is not replenished


class CoroutineCall(Call):
    """A call, passed to its method handler as the context (a subset of `grpc.aio.ServicerContext`).

    The handler runs in a task, which is in `tasks` until it ends. The task is cancelled if the client cancels or
    disconnects, or the deadline passes.
    """

    __slots__ = (
        "_aborted",
        "_half_closed",
        "_handler",
        "_messages",
        "_task",
        "_tasks",
        "_unread",
        "_unreleased",
        "_wakeup",
    )

    def __init__(
        self,
        stream: Http2Stream,
        headers: CallHeaders,
        options: GrpcServerOptions,
        handler: Any,
        tasks: set[asyncio.Task[None]],
    ) -> None:
        super().__init__(stream, headers, options)
        self._handler = handler
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        self._messages: deque[bytes] = deque()
        self._unread = 0  # bytes in `_messages`
        self._unreleased = 0  # received bytes not yet returned to the client's window
        self._half_closed = False
        self._wakeup: asyncio.Future[None] | None = None
        self._aborted: tuple[grpc.StatusCode, str, Metadata] | None = None
        if handler.request_streaming:
            self._start_task(self._iterate_messages())

    # Names as in grpc.aio.ServicerContext.

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """End the call with an error status. Raises `grpc.aio.AbortError`."""
        if self._aborted is None:
            self._aborted = (code, details, trailing_metadata)
        raise grpc.aio.AbortError

    async def write(self, message: Any) -> None:
        """Send a message and wait until it is written. Raises `grpc.aio.UsageError` if the call has ended."""
        if self.done:
            raise grpc.aio.UsageError("the call has ended")
        self._send(self._serialize(message), None)
        try:
            await self._stream.drain()
        except ConnectionResetError:
            raise grpc.aio.UsageError("the client cancelled the call") from None

    # Events of the call.

    def _on_message(self, message: bytes) -> None:
        if self._messages and not self._handler.request_streaming:
            raise MessageError(grpc.StatusCode.INTERNAL, "expected one message, got more")
        self._messages.append(message)
        self._unread += len(message)
        self._notify_reader()

    def _release_window(self, size: int) -> None:
        if self._unread < _MAX_UNREAD or not self._handler.request_streaming:
            self._stream.consumed(size)
        else:
            self._unreleased += size

    def _on_half_close(self) -> None:
        self._half_closed = True
        if self._handler.request_streaming:
            self._notify_reader()
        elif not self._messages:
            self._finish(grpc.StatusCode.INTERNAL, "expected one message, got none")
        else:
            try:
                request = self._deserialize(self._messages.popleft())
            except MessageError as error:
                self._finish(error.code, error.message)
            else:
                self._start_task(request)

    def _on_cancelled(self) -> None:
        self._messages.clear()
        if self._task is not None:
            self._task.cancel()

    # The handler's task.

    def _start_task(self, request: Any) -> None:
        task = self._task = asyncio.get_running_loop().create_task(self._run_handler(request))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._task = None  # the traceback of a cancelled task refers to this call

    async def _run_handler(self, request: Any) -> None:
        try:
            if self._handler.response_streaming:
                await self._run_streaming(request)
            else:
                await self._run_unary(request)
        except grpc.aio.AbortError:
            self._finish(*(self._aborted or (grpc.StatusCode.UNKNOWN, "")))
        except MessageError as error:
            self._finish(error.code, error.message)
        except asyncio.CancelledError:
            self._finish(grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:
            if not self.done:  # after the end, the error is probably caused by the disconnect
                logger.exception("error in the handler of %s", self.headers.path)
            self._finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")

    async def _run_unary(self, request: Any) -> None:
        handler = self._handler
        method = handler.stream_unary if handler.request_streaming else handler.unary_unary
        reply = self._serialize(await method(request, self))
        if not self.done:
            self._send(reply, OK_TRAILERS)
            self._close()

    async def _run_streaming(self, request: Any) -> None:
        handler = self._handler
        method = handler.stream_stream if handler.request_streaming else handler.unary_stream
        result = method(request, self)
        if hasattr(result, "__aiter__"):
            async for message in result:
                await self.write(message)
        else:
            await result
        self._finish(grpc.StatusCode.OK, "")

    async def _iterate_messages(self) -> AsyncIterator[Any]:
        """Yield the deserialized messages of a streaming request."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._unread -= len(message)
                if self._unreleased and self._unread < _MAX_UNREAD:
                    self._stream.consumed(self._unreleased)
                    self._unreleased = 0
                yield self._deserialize(message)
            if self.done:
                raise asyncio.CancelledError
            if self._half_closed:
                return
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup

    def _close(self) -> None:
        super()._close()
        self._notify_reader()

    def _notify_reader(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    def _serialize(self, message: Any) -> bytes:
        serializer = self._handler.response_serializer
        if serializer is None:
            return message  # type: ignore[no-any-return]
        try:
            return serializer(message)  # type: ignore[no-any-return]
        except Exception as error:
            logger.exception("cannot serialize a response of %s", self.headers.path)
            raise MessageError(grpc.StatusCode.INTERNAL, f"Failed to serialize response: {error}") from error

    def _deserialize(self, message: bytes) -> Any:
        deserializer = self._handler.request_deserializer
        if deserializer is None:
            return message
        try:
            return deserializer(message)
        except Exception as error:
            raise MessageError(grpc.StatusCode.INTERNAL, f"Unable to parse request: {error}") from error
