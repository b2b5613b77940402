"""Calls whose handler is a coroutine or an async generator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from neso.frontends.transport.grpc.call import Call, logger
from neso.frontends.transport.grpc.compression import Inflation, MessageError
from neso.frontends.transport.grpc.wire_format import OK_TRAILERS, PREFIX_SIZE, CallHeaders, Metadata
from neso.frontends.transport.http2 import Http2Stream

if TYPE_CHECKING:
    from neso.frontends.transport.grpc.server import GrpcServerOptions

_TURN = 0.005  # seconds; after this long, a handler that has messages to read lets others run


class CoroutineCall(Call):
    """A call, passed to its method handler as the context (a subset of `grpc.aio.ServicerContext`).

    The handler runs in a task, which is in `tasks` until it ends. The task is cancelled if the client cancels or
    disconnects, or the deadline passes.
    """

    __slots__ = (
        "_aborted",
        "_executor",
        "_half_closed",
        "_handler",
        "_inflation",
        "_task",
        "_tasks",
        "_wakeup",
    )

    def __init__(
        self,
        stream: Http2Stream,
        headers: CallHeaders,
        options: GrpcServerOptions,
        handler: Any,
        tasks: set[asyncio.Task[None]],
        executor: Executor,
    ) -> None:
        parsed = handler.request_deserializer is not None
        super().__init__(
            stream, headers, options, options.max_parsed_message if parsed else options.max_message
        )
        self._handler = handler
        self._tasks = tasks
        self._executor = executor
        self._inflation: Inflation | None = None
        self._task: asyncio.Task[None] | None = None
        self._half_closed = False
        self._wakeup: asyncio.Future[None] | None = None
        self._aborted: tuple[grpc.StatusCode, str, Metadata] | None = None
        if handler.request_streaming:
            self._start_task(None)

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

    def _on_data(self) -> None:
        if self._handler.request_streaming:
            self._notify_reader()
        else:
            self._read_only_message()

    def _on_half_close(self) -> None:
        self._half_closed = True
        if self._handler.request_streaming:
            self._notify_reader()
            return
        try:
            self._start_task(self._take_only_message())
        except MessageError as error:
            self._finish(error.code, error.message)

    def _on_cancelled(self) -> None:
        if self._inflation is not None:
            self._inflation.cancelled = True
        if self._task is not None:
            self._task.cancel()

    # The handler's task.

    def _start_task(self, message: bytes | Inflation | None) -> None:
        """Start the handler with the message of a unary request, or None for a streaming request."""
        task = self._task = asyncio.get_running_loop().create_task(self._run_handler(message))
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._task = None  # the traceback of a cancelled task refers to this call

    async def _run_handler(self, message: bytes | Inflation | None) -> None:
        try:
            request: Any = self._iterate_messages() if message is None else await self._plain(message)
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
        finally:
            self._task = None  # a task that raised refers to this object

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
        turn_ends = time.monotonic() + _TURN
        try:
            while not self.done:
                message = self._read_message()
                if message is None:
                    if self._half_closed:
                        break
                    self._wakeup = asyncio.get_running_loop().create_future()
                    await self._wakeup
                    turn_ends = time.monotonic() + _TURN
                    continue
                size = PREFIX_SIZE + (len(message) if isinstance(message, bytes) else message.size)
                request = await self._plain(message)
                self._stream.consumed(size)
                yield request
                if time.monotonic() >= turn_ends:
                    await asyncio.sleep(0)
                    turn_ends = time.monotonic() + _TURN
            if self._reader.missing and not self.done:
                raise MessageError(grpc.StatusCode.INTERNAL, "the last message is truncated")
        except MessageError as error:
            self._end_early(error.code, error.message)

    async def _plain(self, message: bytes | Inflation) -> Any:
        """Decompress and deserialize a message. Raises `MessageError`."""
        if isinstance(message, bytes):
            return self._deserialize(message)
        plain = message.start()
        if plain is None:
            self._inflation = message
            plain = await asyncio.get_running_loop().run_in_executor(self._executor, message.run)
            self._inflation = None
        self._hold(plain)
        try:
            return self._deserialize(plain)
        finally:
            if self._handler.request_streaming:
                self._stream.release(len(plain))

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
