"""Calls in progress, and unary calls that respond from a callback.

              Call                  HTTP/2 stream events, deadline, sending messages and status
     ┌─────────┴──────────┐
CallbackCall        CoroutineCall   (coroutine_call.py)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import grpc

from neso.frontends.transport.grpc.compression import Inflation, MessageError, compress_message
from neso.frontends.transport.grpc.wire_format import (
    GZIP_RESPONSE_HEADERS,
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallHeaders,
    MessageReader,
    Metadata,
    message_prefix,
    status_trailers,
)
from neso.frontends.transport.http2 import Http2Stream

if TYPE_CHECKING:
    from neso.frontends.transport.grpc.server import GrpcServerOptions

logger = logging.getLogger("neso.frontends.transport.grpc")

_LARGE = 64 << 10  # bytes; larger messages are not copied to join them with their prefix

_MIN_RATE = 64 << 10  # bytes per second at which a message must arrive, beyond `message_timeout`


class Call:
    """Base class of calls: receives the events of the HTTP/2 stream, sends messages and one status.

    Subclasses implement `_on_data`, `_on_half_close` and `_on_cancelled`. `done`: the status is sent, or the client
    no longer expects it.

    A message is received into the windows of HTTP/2. Its memory is returned to the client's window when it is consumed;
    a unary call consumes its only message at its end.
    """

    __slots__ = (
        "__weakref__",
        "_compress_level",
        "_deadline_timer",
        "_message",
        "_message_timeout",
        "_message_timer",
        "_reader",
        "_response_headers",
        "_stream",
        "done",
        "headers",
    )

    def __init__(
        self, stream: Http2Stream, headers: CallHeaders, options: GrpcServerOptions, max_message: int
    ) -> None:
        self._stream = stream
        self.headers = headers
        self._reader = MessageReader(headers.encoding, max_message)
        self._compress_level = options.compress_level if headers.accepts_gzip else None
        self._message_timeout = options.message_timeout
        # None after they are sent.
        self._response_headers: bytes | None = (
            RESPONSE_HEADERS if self._compress_level is None else GZIP_RESPONSE_HEADERS
        )
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._message: bytes | Inflation | None = None  # of a unary request
        self._message_timer: asyncio.TimerHandle | None = None
        self.done = False
        if headers.timeout is not None:
            self._deadline_timer = asyncio.get_running_loop().call_later(
                headers.timeout, self._on_deadline_exceeded
            )

    # Names as in grpc.aio.ServicerContext.

    def invocation_metadata(self) -> Metadata:
        """Return the metadata sent by the client."""
        return self.headers.metadata

    def peer(self) -> str:
        """Return the client's address."""
        return self._stream.connection.peer

    @property
    def address(self) -> str:
        """Name of the client in limits, see `client_network`."""
        return self._stream.connection.address

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline, None without a deadline."""
        if self._deadline_timer is None:
            return None
        return max(self._deadline_timer.when() - asyncio.get_running_loop().time(), 0.0)

    # StreamEvents.

    def on_data(self, data: bytes) -> None:
        if self.done:
            return
        self._reader.feed(data)
        try:
            self._on_data()
        except MessageError as error:
            self._end_early(error.code, error.message)

    def on_end(self) -> None:
        if not self.done:
            self._on_half_close()

    def on_reset(self) -> None:
        if not self.done:
            self._close()
            self._reader.clear()
            self._on_cancelled()

    # Hooks for subclasses.

    def _on_data(self) -> None:
        """Handle a part of the request's body. Raises `MessageError`."""
        raise NotImplementedError

    def _on_half_close(self) -> None:
        """Handle the half-close by the client: no more messages follow."""
        raise NotImplementedError

    def _on_cancelled(self) -> None:
        """Handle the end of the call by the client, the deadline or an error, before the handler responded."""
        raise NotImplementedError

    # Helpers for subclasses.

    def _read_message(self) -> bytes | Inflation | None:
        """Return the next message. None: it is incomplete; the client may send the rest. Raises `MessageError`."""
        message = self._reader.read()
        if message is not None:
            if self._message_timer is not None:
                self._message_timer.cancel()
                self._message_timer = None
            return message
        missing = self._reader.missing
        if missing:
            if self._message_timer is None:
                self._message_timer = asyncio.get_running_loop().call_later(
                    self._message_timeout + self._reader.size / _MIN_RATE, self._on_message_timeout
                )
            try:
                self._stream.expect(missing)
            except OverflowError as error:
                raise MessageError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)) from None
        return None

    def _read_only_message(self) -> None:
        """Read the message of a unary request into `_message`. Raises `MessageError` if there are more."""
        while (message := self._read_message()) is not None:
            if self._message is not None:
                raise MessageError(grpc.StatusCode.INTERNAL, "expected one message, got more")
            self._message = message

    def _take_only_message(self) -> bytes | Inflation:
        """Return the message of a unary request that is complete. Raises `MessageError`."""
        if self._reader.missing:
            raise MessageError(grpc.StatusCode.INTERNAL, "the last message is truncated")
        message, self._message = self._message, None
        if message is None:
            raise MessageError(grpc.StatusCode.INTERNAL, "expected one message, got none")
        return message

    def _hold(self, message: bytes) -> None:
        """Account for the memory of a decompressed message. Raises `MessageError`."""
        if not self._stream.hold(len(message)):
            raise MessageError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "the server has no memory for the decompressed message"
            )

    def _send(self, message: bytes, trailers: bytes | None) -> None:
        head, self._response_headers = self._response_headers, None
        if self._compress_level is not None:
            prefix, message = compress_message(message, self._compress_level)
        else:
            prefix = message_prefix(message)
        if len(message) < _LARGE:
            self._stream.send(head, prefix + message, trailers)
        else:
            self._stream.send(head, prefix, None)
            self._stream.send(None, message, trailers)

    def _finish(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        """Send the status unless the call has ended."""
        if self.done:
            return
        trailers = status_trailers(code, details, metadata)
        # Without a message, headers and trailers are one block ("Trailers-Only").
        self._stream.send(
            None, b"", trailers if self._response_headers is None else self._response_headers + trailers
        )
        self._close()

    def _close(self) -> None:
        self.done = True
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        if self._message_timer is not None:
            self._message_timer.cancel()

    def _end_early(self, code: grpc.StatusCode, details: str) -> None:
        if not self.done:
            self._finish(code, details)
            self._reader.clear()
            self._on_cancelled()

    def _on_deadline_exceeded(self) -> None:
        self._end_early(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _on_message_timeout(self) -> None:
        self._end_early(grpc.StatusCode.RESOURCE_EXHAUSTED, "the message took too long to arrive")


class CallbackHandler(grpc.RpcMethodHandler):  # type: ignore[misc]
    """Method handler of a unary method that responds from a callback, without a coroutine or task.

    `start(message, call)` must arrange that `call.reply` or `call.fail` is called eventually. Exceptions raised by
    `start` are logged and end the call with UNKNOWN.
    """

    request_streaming = False
    response_streaming = False
    request_deserializer = None
    response_serializer = None
    unary_unary = unary_stream = stream_unary = stream_stream = None

    def __init__(self, start: Callable[[bytes, CallbackCall], None]) -> None:
        self.start = start


class CallbackCall(Call):
    """A unary call that ends with the first `reply` or `fail`; later calls have no effect.

    `on_cancel` is called if the client cancels or disconnects, or the deadline passes, before the call has ended.
    """

    __slots__ = ("_executor", "_inflation", "_start", "on_cancel")

    def __init__(
        self,
        stream: Http2Stream,
        headers: CallHeaders,
        options: GrpcServerOptions,
        start: Callable[[bytes, CallbackCall], None],
        executor: Executor,
    ) -> None:
        super().__init__(stream, headers, options, options.max_message)
        self._start = start
        self._executor = executor
        self._inflation: Inflation | None = None
        self.on_cancel: Callable[[], None] | None = None

    def reply(self, message: bytes) -> None:
        """Send the response with status OK."""
        if not self.done:
            self._send(message, OK_TRAILERS)
            self._close()
            self.on_cancel = None

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with an error status."""
        self._finish(code, details)
        self.on_cancel = None

    def on_data(self, data: bytes) -> None:
        if self._message is None and not self.done:
            self._message = self._reader.read_whole(data)
            if self._message is not None:
                return
        super().on_data(data)

    def _on_data(self) -> None:
        self._read_only_message()

    def _on_half_close(self) -> None:
        try:
            message = self._take_only_message()
            if isinstance(message, bytes):
                self._run(message)
            elif (plain := message.start()) is not None:
                self._hold(plain)
                self._run(plain)
            else:
                self._inflation = message
                loop = asyncio.get_running_loop()
                loop.run_in_executor(self._executor, message.run).add_done_callback(self._on_inflated)
        except MessageError as error:
            self._finish(error.code, error.message)

    def _on_inflated(self, future: asyncio.Future[bytes]) -> None:
        self._inflation = None
        try:
            message = future.result()
            if not self.done:
                self._hold(message)
                self._run(message)
        except MessageError as error:
            self._finish(error.code, error.message)
        except asyncio.CancelledError:
            pass  # the server has stopped and ended the call
        except Exception as error:
            logger.exception("cannot decompress a message of %s", self.headers.path)
            self._finish(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")

    def _run(self, message: bytes) -> None:
        try:
            self._start(message, self)
        except Exception as error:
            logger.exception("error in the handler of %s", self.headers.path)
            self.fail(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")

    def _on_cancelled(self) -> None:
        self._message = None
        if self._inflation is not None:
            self._inflation.cancelled = True
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()
