"""A connection to the KV server of another engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from neso.engine.core.stats import FallbackReason
from neso.engine.kv_transfer.protocol import (
    Content,
    Ended,
    KvAddress,
    Query,
    Read,
    Refused,
    Reply,
    encoder,
    reply_decoder,
)

R = TypeVar("R", bound=Reply)

ANSWER_SECONDS = 10.0
"""Time after which an engine that does not answer is given up. It answers within `POLL_SECONDS` if it is well."""
_CANCEL_SECONDS = 0.1
"""Time within which a reader that waits for an answer notices that its request was aborted."""


class TransferError(Exception):
    """Blocks cannot be transferred; the message is for the log and the client, `reason` for the statistics."""

    def __init__(self, message: str, reason: FallbackReason = "refused") -> None:
        super().__init__(message)
        self.reason: FallbackReason = reason


class Connection:
    """A connection to a KV server; used by one thread.

    A question waits for `ANSWER_SECONDS` at most, until `deadline`, or until `is_cancelled` returns True.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        deadline: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        try:
            endpoint, self.token = KvAddress.parse(address)
        except ValueError as error:
            raise TransferError(f"the address {error}") from None
        self.deadline = deadline
        self._is_cancelled = is_cancelled
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransferError(f"cannot connect to {endpoint}: {error}", "disconnected") from None

    def ask(self, query: Query, kind: type[R]) -> R | Ended:
        """Return the reply. Raises `TransferError` if there is none in time or the query is refused."""
        return self._ask(query, kind)[0]

    def ask_for_content(self, query: Read) -> tuple[Content, memoryview]:
        """Return the reply to `Read` and its second frame. Raises `TransferError`."""
        reply, frames = self._ask(query, Content)
        if isinstance(reply, Ended) or len(frames) != 2:
            raise TransferError("the other engine sent no blocks", "error")
        return reply, frames[1].buffer

    def _ask(self, query: Query, kind: type[R]) -> tuple[R | Ended, list[zmq.Frame]]:
        self._socket.send(encoder.encode(query))
        end = self.next_end()
        while not self._socket.poll(max(0, int(1000 * min(_CANCEL_SECONDS, end - time.monotonic())))):
            self.check(end)
        frames = self._socket.recv_multipart(copy=False)
        try:
            reply = reply_decoder.decode(frames[0].buffer)
        except msgspec.MsgspecError as error:
            raise TransferError(f"the other engine sent an invalid message: {error}", "error") from None
        if isinstance(reply, Refused):
            raise TransferError(f"the other engine refused: {reply.reason}")
        if not isinstance(reply, kind | Ended):
            raise TransferError(f"the other engine sent {type(reply).__name__}", "error")
        return reply, frames

    def next_end(self) -> float:
        """Return until when to wait for what begins now."""
        return min(self.deadline, time.monotonic() + ANSWER_SECONDS)

    def check(self, end: float) -> None:
        """Raise `TransferError` if the wait until `end` is over, or the request was aborted."""
        if self._is_cancelled():
            raise TransferError("the request was aborted", "aborted")
        if time.monotonic() >= end:
            raise TransferError("the other engine did not answer in time", "timeout")

    def close(self) -> None:
        self._socket.close()
