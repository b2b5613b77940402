"""Calls in progress, and unary calls that respond from a callback.

              Call                  HTTP/2 stream events, deadline, sending messages and status
     ┌─────────┴──────────┐
CallbackCall        CoroutineCall   (coroutine_call.py)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from neso.frontends.transport.grpc.wire_format import (
    GZIP_RESPONSE_HEADERS,
    OK_TRAILERS,
    RESPONSE_HEADERS,
    CallHeaders,
    MessageError,
    MessageReader,
    Metadata,
    compress_message,
    message_prefix,
    status_trailers,
)
from neso.frontends.transport.http2 import Http2Stream

if TYPE_CHECKING:
    from neso.frontends.transport.grpc.server import GrpcServerOptions

logger = logging.getLogger("neso.frontends.transport.grpc")

_LARGE = 64 << 10  # bytes; larger messages are not copied to join them with their prefix


class Call:
    """Base class of calls: receives the events of the HTTP/2 stream, sends messages and one status.

    Subclasses implement `_on_message`, `_on_half_close` and `_on_cancelled`. `done`: the status is sent, or the client
    no longer expects it.
    """

    __slots__ = (
        "__weakref__",
        "_compress_level",
        "_deadline_timer",
        "_reader",
        "_response_headers",
        "_stream",
        "done",
        "headers",
    )

    def __init__(self, stream: Http2Stream, headers: CallHeaders, options: GrpcServerOptions) -> None:
        self._stream = stream
        self.headers = headers
        self._reader = MessageReader(headers.encoding, options.max_message)
        self._compress_level = options.compress_level if headers.accepts_gzip else None
        # None after they are sent.
        self._response_headers: bytes | None = (
            RESPONSE_HEADERS if self._compress_level is None else GZIP_RESPONSE_HEADERS
        )
        self._deadline_timer: asyncio.TimerHandle | None = None
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
        """IP address of the client, "" for a Unix socket."""
        return self._stream.connection.address

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline, None without a deadline."""
        if self._deadline_timer is None:
            return None
        return max(self._deadline_timer.when() - asyncio.get_running_loop().time(), 0.0)

    # StreamEvents.

    def on_data(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._on_message(message)
        except MessageError as error:
            self._end_early(error.code, error.message)
            return
        self._release_window(len(data))

    def on_end(self) -> None:
        if self.done:
            return
        if self._reader.in_message:
            self._end_early(grpc.StatusCode.INTERNAL, "the last message is truncated")
        else:
            self._on_half_close()

    def on_reset(self) -> None:
        if not self.done:
            self._close()
            self._on_cancelled()

    # Hooks for subclasses.

    def _on_message(self, message: bytes) -> None:
        """Handle a received message. Raises `MessageError`."""
        raise NotImplementedError

    def _on_half_close(self) -> None:
        """Handle the half-close by the client: no more messages follow."""
        raise NotImplementedError

    def _on_cancelled(self) -> None:
        """Handle the end of the call by the client, the deadline or an error, before the handler responded."""
        raise NotImplementedError

    def _release_window(self, size: int) -> None:
        """Return `size` received bytes to the client's flow-control window."""
        self._stream.consumed(size)

    # Helpers for subclasses.

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

    def _end_early(self, code: grpc.StatusCode, details: str) -> None:
        if not self.done:
            self._finish(code, details)
            self._on_cancelled()

    def _on_deadline_exceeded(self) -> None:
        self._end_early(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


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

    __slots__ = ("_message", "_start", "on_cancel")

    def __init__(
        self,
        stream: Http2Stream,
        headers: CallHeaders,
        options: GrpcServerOptions,
        start: Callable[[bytes, CallbackCall], None],
    ) -> None:
        super().__init__(stream, headers, options)
        self._start = start
        self._message: bytes | None = None
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

    def _on_message(self, message: bytes) -> None:
        if self._message is not None:
            raise MessageError(grpc.StatusCode.INTERNAL, "expected one message, got more")
        self._message = message

    def _on_half_close(self) -> None:
        message, self._message = self._message, None
        if message is None:
            self._finish(grpc.StatusCode.INTERNAL, "expected one message, got none")
            return
        try:
            self._start(message, self)
        except Exception as error:
            logger.exception("error in the handler of %s", self.headers.path)
            self.fail(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")

    def _on_cancelled(self) -> None:
        self._message = None
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()
