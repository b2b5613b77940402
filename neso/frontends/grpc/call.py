"""One call: messages in, messages out, one status."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc

from neso.frontends.grpc import status
from neso.frontends.grpc.messages import MessageFault, MessageReader, compress_message, message_prefix
from neso.frontends.grpc.metadata import CallHeaders, Metadata
from neso.frontends.http2 import Http2Stream

if TYPE_CHECKING:
    from neso.frontends.grpc.options import GrpcServerOptions

logger = logging.getLogger("neso.frontends.grpc")

_LARGE = 64 << 10  # bytes; such a message is not copied to be sent with its prefix


class Call:
    """The events of the stream, and what all kinds of calls have in common.

    A subclass says what is done with a message (`_received`), with the end of the messages (`_ended`), and with the
    end of the call before it is answered (`_given_up`).
    """

    __slots__ = (
        "__weakref__",
        "_compress_level",
        "_deadline",
        "_head",
        "_reader",
        "_stream",
        "done",
        "headers",
    )

    def __init__(self, stream: Http2Stream, headers: CallHeaders, options: GrpcServerOptions) -> None:
        self._stream = stream
        self.headers = headers
        self._reader = MessageReader(headers.encoding, options.max_message)
        self._compress_level = options.compress_level if headers.accepts_gzip else None
        self._head: bytes | None = status.HEAD if self._compress_level is None else status.GZIP_HEAD
        self._deadline: asyncio.TimerHandle | None = None
        self.done = False  # the status is sent, or nobody wants it any more
        if headers.timeout is not None:
            self._deadline = asyncio.get_running_loop().call_later(headers.timeout, self._expire)

    # By the names of grpc.aio.ServicerContext.

    def invocation_metadata(self) -> Metadata:
        """Names and values that the client sent along."""
        return self.headers.metadata

    def peer(self) -> str:
        """The client's address."""
        return self._stream.connection.peer

    def time_remaining(self) -> float | None:
        """Seconds until the deadline, None without one."""
        if self._deadline is None:
            return None
        return max(self._deadline.when() - asyncio.get_running_loop().time(), 0.0)

    # What the stream says.

    def on_data(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._received(message)
        except MessageFault as fault:
            self._end_early(fault.code, fault.message)
            return
        self._dealt_with(len(data))

    def on_end(self) -> None:
        if self.done:
            return
        if self._reader.in_message:
            self._end_early(grpc.StatusCode.INTERNAL, "the last message is cut off")
        else:
            self._ended()

    def on_reset(self) -> None:
        if not self.done:
            self._close()
            self._given_up()

    # What subclasses do.

    def _received(self, message: bytes) -> None:
        """A message has come. Raises `MessageFault`."""
        raise NotImplementedError

    def _ended(self) -> None:
        """No more messages will come."""
        raise NotImplementedError

    def _given_up(self) -> None:
        """The call has ended before it was answered."""
        raise NotImplementedError

    def _dealt_with(self, size: int) -> None:
        """So many bytes have come and are not to be kept back from the client's window."""
        self._stream.consumed(size)

    # What they call.

    def _send(self, message: bytes, trailers: bytes | None) -> None:
        head, self._head = self._head, None
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
        """Send the status, unless the call has ended."""
        if self.done:
            return
        trailers = status.trailers(code, details, metadata)
        # Without a message, head and trailers are one block.
        self._stream.send(None, b"", trailers if self._head is None else self._head + trailers)
        self._close()

    def _close(self) -> None:
        self.done = True
        if self._deadline is not None:
            self._deadline.cancel()

    def _end_early(self, code: grpc.StatusCode, details: str) -> None:
        if not self.done:
            self._finish(code, details)
            self._given_up()

    def _expire(self) -> None:
        self._end_early(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
