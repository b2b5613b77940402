"""One call: messages in, messages out, one status."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from neso.frontends.grpc import status
from neso.frontends.grpc.messages import MessageFault, MessageReader, frame_message
from neso.frontends.grpc.metadata import CallHeaders, Metadata
from neso.frontends.http2 import Http2Stream

logger = logging.getLogger(__name__)

# So many messages of a streaming call may wait to be read before the client is kept from sending more.
_MOST_UNREAD = 64


class ServerCall:
    """What a method handler gets as its context, by the names of `grpc.aio.ServicerContext`; the stream's events.

    The handler runs in a task of its own, which is cancelled when the client cancels or goes away, or its deadline is
    over.
    """

    def __init__(
        self,
        stream: Http2Stream,
        headers: CallHeaders,
        handler: Any,
        max_message: int,
        compress_level: int | None,
        ended: Callable[[ServerCall], None],
    ) -> None:
        self._stream = stream
        self._headers = headers
        self._handler = handler
        self._reader = MessageReader(headers.encoding, max_message)
        self._compress_level = compress_level if headers.accepts_gzip else None
        self._ended = ended
        self._messages: deque[bytes] = deque()
        self._unread = 0  # bytes that came and were not given back to the client's window
        self._half_closed = False
        self._wake: asyncio.Future[None] | None = None
        self._head: bytes | None = status.HEAD if self._compress_level is None else status.GZIP_HEAD
        self._aborted: tuple[grpc.StatusCode, str] | None = None
        self._done = False
        self.task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start to serve the call; a unary one when its message is there."""
        timeout = self._headers.timeout
        if timeout is not None:
            self._deadline = asyncio.get_running_loop().call_later(timeout, self._expire)
        if self._handler.request_streaming:
            self._start(self._requests())

    # By the names of grpc.aio.

    def invocation_metadata(self) -> Metadata:
        """Names and values that the client sent along."""
        return self._headers.metadata

    def peer(self) -> str:
        """The client's address."""
        return self._stream.connection.peer

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, None without one."""
        if self._deadline is None:
            return None
        return max(self._deadline.when() - asyncio.get_running_loop().time(), 0.0)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        """End the call with a status. Raises `grpc.aio.AbortError`."""
        if self._aborted is None:
            self._aborted = (code, details)
        raise grpc.aio.AbortError

    async def write(self, message: Any) -> None:
        """Send a message, and wait until there is room for the next. Raises `grpc.aio.UsageError` after the end."""
        if self._done:
            raise grpc.aio.UsageError("the call has ended")
        self._send(self._serialize(message), None)
        try:
            await self._stream.drain()
        except ConnectionResetError:
            raise grpc.aio.UsageError("the client has given up") from None

    # What the stream says.

    def on_data(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._messages.append(message)
        except MessageFault as fault:
            self._finish(grpc.StatusCode[fault.code], fault.message)
            return
        if len(self._messages) < _MOST_UNREAD:
            self._stream.consumed(len(data))
        else:
            self._unread += len(data)
        self._notify()

    def on_end(self) -> None:
        self._half_closed = True
        if self._handler.request_streaming:
            self._notify()
        elif len(self._messages) == 1 and not self._reader.in_message:
            self._start(self._deserialize(self._messages.popleft()))
        elif not self._done:
            self._finish(grpc.StatusCode.INTERNAL, f"expected one message, got {len(self._messages)}")

    def on_reset(self) -> None:
        self._close()
        if self.task is not None:
            self.task.cancel()

    # The rest is the call's own.

    def _start(self, request: Any) -> None:
        if not self._done:
            self.task = asyncio.get_running_loop().create_task(self._run(request))

    async def _run(self, request: Any) -> None:
        try:
            await self._answer(request)
        except grpc.aio.AbortError:
            code, details = self._aborted or (grpc.StatusCode.UNKNOWN, "")
            self._finish(code, details)
        except asyncio.CancelledError:
            self._finish(grpc.StatusCode.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:
            logger.exception("error in the handler of %s", self._headers.path)
            self._finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")

    async def _answer(self, request: Any) -> None:
        handler = self._handler
        if not handler.response_streaming:
            method = handler.stream_unary if handler.request_streaming else handler.unary_unary
            reply = self._serialize(await method(request, self))
            if not self._done:
                self._send(reply, status.OK)
                self._close()
            return
        method = handler.stream_stream if handler.request_streaming else handler.unary_stream
        result = method(request, self)
        if hasattr(result, "__aiter__"):
            async for message in result:
                await self.write(message)
        else:
            await result
        self._finish(grpc.StatusCode.OK, "")

    def _send(self, message: bytes, trailers: bytes | None) -> None:
        head, self._head = self._head, None
        self._stream.send(head, frame_message(message, self._compress_level), trailers)

    def _finish(self, code: grpc.StatusCode, details: str) -> None:
        """Send the status, unless the call has ended."""
        if self._done:
            return
        trailers = status.trailers(code, details)
        if self._head is not None:
            # Without a message, head and trailers are one block.
            self._stream.send(None, b"", self._head + trailers)
        else:
            self._stream.send(None, b"", trailers)
        self._close()

    def _close(self) -> None:
        if self._done:
            return
        self._done = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._notify()
        self._ended(self)

    def _expire(self) -> None:
        self._finish(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        if self.task is not None:
            self.task.cancel()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def _requests(self) -> AsyncIterator[Any]:
        """The messages of a streaming call, as they come."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                if self._unread and len(self._messages) < _MOST_UNREAD:
                    self._stream.consumed(self._unread)
                    self._unread = 0
                yield self._deserialize(message)
            if self._half_closed or self._done:
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake

    def _serialize(self, message: Any) -> bytes:
        serializer = self._handler.response_serializer
        return message if serializer is None else serializer(message)  # type: ignore[no-any-return]

    def _deserialize(self, message: bytes) -> Any:
        deserializer = self._handler.request_deserializer
        return message if deserializer is None else deserializer(message)
