"""Unary methods that answer from a callback, without a coroutine and without a task."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from neso.frontends.grpc import status
from neso.frontends.grpc.call import Call, logger
from neso.frontends.grpc.messages import MessageFault
from neso.frontends.grpc.metadata import CallHeaders
from neso.frontends.grpc.options import GrpcServerOptions
from neso.frontends.http2 import Http2Stream


class DeferredHandler(grpc.RpcMethodHandler):  # type: ignore[misc]
    """A method handler. `start(message, call)` begins to answer, and sees to it that `call` is answered some time.

    What `start` raises is logged, and ends the call with UNKNOWN.
    """

    request_streaming = False
    response_streaming = False
    request_deserializer = None
    response_serializer = None
    unary_unary = unary_stream = stream_unary = stream_stream = None

    def __init__(self, start: Callable[[bytes, DeferredCall], None]) -> None:
        self.start = start


class DeferredCall(Call):
    """To be answered once, by `reply` or `fail`; what comes after that is dropped.

    `on_cancel` is called when the client has cancelled or is gone, or the deadline is over, unless the call was
    answered before; nothing more can be said then.
    """

    __slots__ = ("_message", "_start", "on_cancel")

    def __init__(
        self,
        stream: Http2Stream,
        headers: CallHeaders,
        options: GrpcServerOptions,
        start: Callable[[bytes, DeferredCall], None],
    ) -> None:
        super().__init__(stream, headers, options)
        self._start = start
        self._message: bytes | None = None
        self.on_cancel: Callable[[], None] | None = None

    def reply(self, message: bytes) -> None:
        """Answer, and end the call well."""
        if not self.done:
            self._send(message, status.OK)
            self._close()
            self.on_cancel = None

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status."""
        self._finish(code, details)
        self.on_cancel = None

    def _received(self, message: bytes) -> None:
        if self._message is not None:
            raise MessageFault(grpc.StatusCode.INTERNAL, "expected one message, got more")
        self._message = message

    def _ended(self) -> None:
        message, self._message = self._message, None
        if message is None:
            self._finish(grpc.StatusCode.INTERNAL, "expected one message, got none")
            return
        try:
            self._start(message, self)
        except Exception as error:
            logger.exception("error in the handler of %s", self.headers.path)
            self.fail(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}")

    def _given_up(self) -> None:
        self._message = None
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()
