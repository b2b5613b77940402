"""A call whose handler is a coroutine."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import grpc.aio

from neso.frontends.grpc import status
from neso.frontends.grpc.call import Call, logger
from neso.frontends.grpc.messages import MessageFault
from neso.frontends.grpc.metadata import CallHeaders, Metadata
from neso.frontends.grpc.options import GrpcServerOptions
from neso.frontends.http2 import Http2Stream

# So many bytes of a streaming call may wait to be read before the client is kept from sending more.
_MOST_UNREAD = 1 << 20


class TaskCall(Call):
    """What a method handler gets as its context, by the names of `grpc.aio.ServicerContext`.

    The handler runs in a task of its own, which is cancelled when the client cancels or goes away, or its deadline is
    over. `tasks` has the task while it runs.
    """

    __slots__ = (
        "_aborted",
        "_half_closed",
        "_handler",
        "_held_back",
        "_messages",
        "_task",
        "_tasks",
        "_unread",
        "_wake",
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
        self._unread = 0  # bytes of these
        self._held_back = 0  # bytes that came and were not given back to the client's window
        self._half_closed = False
        self._wake: asyncio.Future[None] | None = None
        self._aborted: tuple[grpc.StatusCode, str, Metadata] | None = None
        if handler.request_streaming:
            self._run(self._requests())

    # By the names of grpc.aio.ServicerContext.

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """End the call with a status. Raises `grpc.aio.AbortError`."""
        if self._aborted is None:
            self._aborted = (code, details, trailing_metadata)
        raise grpc.aio.AbortError

    async def write(self, message: Any) -> None:
        """Send a message, and wait until there is room for the next. Raises `grpc.aio.UsageError` after the end."""
        if self.done:
            raise grpc.aio.UsageError("the call has ended")
        self._send(self._serialize(message), None)
        try:
            await self._stream.drain()
        except ConnectionResetError:
            raise grpc.aio.UsageError("the client has given up") from None

    # What the stream says.

    def _received(self, message: bytes) -> None:
        if self._messages and not self._handler.request_streaming:
            raise MessageFault(grpc.StatusCode.INTERNAL, "expected one message, got more")
        self._messages.append(message)
        self._unread += len(message)
        self._notify()

    def _dealt_with(self, size: int) -> None:
        if self._unread < _MOST_UNREAD or not self._handler.request_streaming:
            self._stream.consumed(size)
        else:
            self._held_back += size

    def _ended(self) -> None:
        self._half_closed = True
        if self._handler.request_streaming:
            self._notify()
        elif not self._messages:
            self._finish(grpc.StatusCode.INTERNAL, "expected one message, got none")
        else:
            try:
                request = self._deserialize(self._messages.popleft())
            except MessageFault as fault:
                self._finish(fault.code, fault.message)
            else:
                self._run(request)

    def _given_up(self) -> None:
        self._messages.clear()
        if self._task is not None:
            self._task.cancel()

    # The task.

    def _run(self, request: Any) -> None:
        task = self._task = asyncio.get_running_loop().create_task(self._answer(request))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: Any) -> None:
        try:
            if self._handler.response_streaming:
                await self._stream_responses(request)
            else:
                await self._respond(request)
        except grpc.aio.AbortError:
            self._finish(*(self._aborted or (grpc.StatusCode.UNKNOWN, "")))
        except MessageFault as fault:
            self._finish(fault.code, fault.message)
        except asyncio.CancelledError:
            self._finish(grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:
            if not self.done:  # else it may well be that there is no client
                logger.exception("error in the handler of %s", self.headers.path)
            self._finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")

    async def _respond(self, request: Any) -> None:
        handler = self._handler
        method = handler.stream_unary if handler.request_streaming else handler.unary_unary
        reply = self._serialize(await method(request, self))
        if not self.done:
            self._send(reply, status.OK)
            self._close()

    async def _stream_responses(self, request: Any) -> None:
        handler = self._handler
        method = handler.stream_stream if handler.request_streaming else handler.unary_stream
        result = method(request, self)
        if hasattr(result, "__aiter__"):
            async for message in result:
                await self.write(message)
        else:
            await result
        self._finish(grpc.StatusCode.OK, "")

    async def _requests(self) -> AsyncIterator[Any]:
        """The messages of a streaming call, as they come."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                self._unread -= len(message)
                if self._held_back and self._unread < _MOST_UNREAD:
                    self._stream.consumed(self._held_back)
                    self._held_back = 0
                yield self._deserialize(message)
            if self.done:
                raise asyncio.CancelledError
            if self._half_closed:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def _close(self) -> None:
        super()._close()
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _serialize(self, message: Any) -> bytes:
        serializer = self._handler.response_serializer
        if serializer is None:
            return message  # type: ignore[no-any-return]
        try:
            return serializer(message)  # type: ignore[no-any-return]
        except Exception as error:
            logger.exception("a response of %s cannot be serialized", self.headers.path)
            raise MessageFault(grpc.StatusCode.INTERNAL, f"Failed to serialize response: {error}") from error

    def _deserialize(self, message: bytes) -> Any:
        deserializer = self._handler.request_deserializer
        if deserializer is None:
            return message
        try:
            return deserializer(message)
        except Exception as error:
            raise MessageFault(grpc.StatusCode.INTERNAL, f"Unable to parse request: {error}") from error
