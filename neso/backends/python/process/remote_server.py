"""Child side of the channel, and the `ServerAccess` of models in child processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from io import FileIO
from typing import Any

from neso.backends.python.errors import TritonModelException
from neso.backends.python.process.codec import Decoder, MessageCodec, encode, unpack_error
from neso.backends.python.process.messages import (
    Call,
    CallResponse,
    CancelCall,
    DropHandle,
    Initialize,
    Message,
    Query,
    Release,
    Reply,
    TakenOfCall,
)
from neso.backends.python.process.shared_memory import Arena
from neso.backends.python.server_access import Deliver, ServerAccess
from neso.server.errors import ServerError
from neso.server.inference_request import InferenceRequest

_READ_BYTES = 1 << 18


class ChildChannel:
    """Sends messages from any thread, including finalizers. One thread iterates over the received messages.

    Iteration ends when the server closes the connection.
    """

    codec: MessageCodec

    def __init__(self, connection: socket.socket, from_server: int, to_server: int) -> None:
        self._socket = connection
        self._from_server, self._to_server = FileIO(from_server, "r+"), FileIO(to_server, "r+")
        self._decoder = Decoder()
        # Reentrant: a finalizer can send while its own thread is sending. Messages are not interleaved, because each
        # is sent by one call of `sendall`.
        self._lock = threading.RLock()
        self._deferred: list[bytes] = []
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a process forked by the model: it must not use the channel."""
        return os.getpid() != self._pid

    def receive_first(self) -> Message | None:
        """Receive the first message, `Initialize` or `AutoComplete`; None if the server has closed the connection."""
        message = next(iter(self), None)
        if isinstance(message, Initialize):
            arena = Arena(self._to_server, message.shm_default_size, message.shm_growth_size)
            self.codec = MessageCodec(arena, self._from_server, self._release)
        return message

    def send(self, message: Message) -> None:
        """Send a message. Dropped if the server has ended. Raises `TypeError` for fields that are not plain data."""
        data = encode(message)
        if self.forked:
            return  # finalizers in a process forked by the model must not release this process's blocks
        # The reading thread detects a closed socket and ends this process.
        with self._lock, contextlib.suppress(OSError):
            if self._deferred:
                data = b"".join((*self._deferred, data))
                self._deferred.clear()
            self._socket.sendall(data)

    def send_later(self, message: Message) -> None:
        """Send together with the next message, to wake the server only once. The next message must follow soon."""
        data = encode(message)
        with self._lock:
            self._deferred.append(data)

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            for message in self._decoder.feed(data):
                if isinstance(message, Release):
                    for offset in message.offsets:
                        self.codec.own.release(offset)
                    self.codec.own.trim()
                else:
                    yield message

    def _release(self, offset: int) -> None:
        self.send(Release((offset,)))


class RemoteServer(ServerAccess):
    """Forwards calls to the server as messages. `handle` receives the replies."""

    def __init__(self, channel: ChildChannel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._pending_queries: dict[int, Future[Any]] = {}
        self._calls: dict[int, Deliver] = {}

    @property
    def server(self) -> object:
        return self

    @property
    def ended(self) -> bool:
        return False  # this process ends with the server

    def handle(self, message: Message) -> None:
        match message:
            case Reply(query, value, error):
                future = self._pending_queries.pop(query)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(unpack_error(error))
            case CallResponse(call, data, size):
                deliver = self._calls.pop(call) if data.final else self._calls[call]
                response = self._channel.codec.unpack_response(data)
                response.backlog_size = size
                deliver(response)

    def call(self, request: InferenceRequest, decoupled: bool, deliver: Deliver) -> RemoteCall:
        number = next(self._numbers)
        self._calls[number] = deliver
        try:
            packed = self._channel.codec.pack_request(request, request.trace)  # type: ignore[arg-type]
            self._channel.send(Call(number, packed, decoupled))
        except Exception:
            del self._calls[number]
            raise
        return RemoteCall(self._channel, number)

    def load_model(self, name: str, config: str | None, files: dict[str, bytes] | None) -> None:
        self._query_model("load_model", name, config, files)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._query_model("unload_model", name, bool(unload_dependents))

    def model_ready(self, name: str, version: str) -> bool:
        return bool(self._query_model("model_ready", name, version))

    def metric_family(self, name: str, description: str, kind: str) -> RemoteFamily:
        return RemoteFamily(self, self.query("metric_family", name, description, kind))

    def query(self, method: str, *arguments: Any) -> Any:
        """Call a method of `ServerRequestHandler`, wait for its reply, and raise its `ServerError`, if any."""
        if self._channel.forked:
            raise TritonModelException(
                "metrics can only be used in the process that runs the model, not in forks"
            )
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._pending_queries[number] = future
        try:
            self._channel.send(Query(number, method, arguments))
        except Exception:
            del self._pending_queries[number]
            raise
        return future.result()

    def drop(self, handle: int) -> None:
        """Release a metric or a metric family."""
        self._channel.send(DropHandle(handle))

    def _query_model(self, method: str, *arguments: Any) -> Any:
        try:
            return self.query(method, *arguments)
        except ServerError as error:
            raise TritonModelException(error.message) from None


class RemoteCall:
    """A BLS call in flight."""

    def __init__(self, channel: ChildChannel, number: int) -> None:
        self._channel, self._number = channel, number

    def cancel(self) -> None:
        self._channel.send(CancelCall(self._number))

    def taken(self, size: int) -> None:
        self._channel.send(TakenOfCall(self._number, size))


class _RemoteHandle:
    """An object on the server, kept there for the lifetime of this handle."""

    def __init__(self, server: RemoteServer, handle: int) -> None:
        self._server, self._handle = server, handle

    def __del__(self) -> None:
        self._server.drop(self._handle)


class RemoteFamily(_RemoteHandle):
    """A metric family on the server."""

    def metric(self, labels: Mapping[str, str] | None, buckets: Sequence[float] | None) -> RemoteMetric:
        # Invalid labels are passed on unchanged: the server validates them.
        plain = dict(labels) if isinstance(labels, Mapping) else labels
        bounds = None if buckets is None else tuple(float(bound) for bound in buckets)
        return RemoteMetric(self._server, self._server.query("metric", self._handle, plain, bounds))


class RemoteMetric(_RemoteHandle):
    """A metric on the server."""

    def increment(self, value: float) -> None:
        self._server.query("increment", self._handle, float(value))

    def set(self, value: float) -> None:
        self._server.query("set", self._handle, float(value))

    def observe(self, value: float) -> None:
        self._server.query("observe", self._handle, float(value))

    def value(self) -> float:
        return float(self._server.query("value", self._handle))
