"""The model's end of the socket."""

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
from neso.backends.python.process.codec import Decoder, Exchange, encode, unpack_error
from neso.backends.python.process.messages import (
    Answer,
    Ask,
    Call,
    CallResponse,
    CancelCall,
    Drop,
    Initialize,
    Message,
    Release,
)
from neso.backends.python.process.shared_memory import Arena
from neso.backends.python.server_access import Deliver, ServerAccess
from neso.server.errors import ServerError
from neso.server.inference_request import InferenceRequest

_READ_BYTES = 1 << 18


class ChildChannel:
    """Sends from any thread, even from a finalizer; one thread iterates over what comes, until the server is gone."""

    exchange: Exchange

    def __init__(self, connection: socket.socket, from_server: int, to_server: int) -> None:
        self._socket = connection
        self._from_server, self._to_server = FileIO(from_server, "r+"), FileIO(to_server, "r+")
        self._decoder = Decoder()
        # Finalizers may send while their thread is sending: between two messages, as sending one is one call.
        self._lock = threading.RLock()
        self._waiting: list[bytes] = []
        self._process = os.getpid()

    def receive_first(self) -> Message | None:
        """The message that says what to be; None if the server has gone already."""
        message = next(iter(self), None)
        if isinstance(message, Initialize):
            arena = Arena(self._to_server, message.shm_default_size, message.shm_growth_size)
            self.exchange = Exchange(arena, self._from_server, self._release)
        return message

    def send(self, message: Message) -> None:
        """Raises `TypeError` for what cannot be sent. What comes after the server's end is dropped."""
        data = encode(message)
        if os.getpid() != self._process:
            return  # a copy of this process, which a model may have forked: it lets go of what it does not own
        # A socket that is closed is for the reader to notice, which ends this process.
        with self._lock, contextlib.suppress(OSError):
            if self._waiting:
                data = b"".join((*self._waiting, data))
                self._waiting.clear()
            self._socket.sendall(data)

    def send_later(self, message: Message) -> None:
        """Together with the next one, which must be soon: waking the server costs more than the message itself."""
        data = encode(message)
        with self._lock:
            self._waiting.append(data)

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
                        self.exchange.own.release(offset)
                else:
                    yield message

    def _release(self, offset: int) -> None:
        self.send(Release((offset,)))


class RemoteServer(ServerAccess):
    """Asks through the channel; `handle` gets what the server says to that."""

    def __init__(self, channel: ChildChannel) -> None:
        self._channel = channel
        self._numbers = itertools.count()
        self._questions: dict[int, Future[Any]] = {}
        self._calls: dict[int, Deliver] = {}

    @property
    def server(self) -> object:
        return self

    @property
    def ended(self) -> bool:
        return False  # this process ends with the server

    def handle(self, message: Message) -> None:
        match message:
            case Answer(question, value, error):
                future = self._questions.pop(question)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(unpack_error(error))
            case CallResponse(call, response):
                deliver = self._calls.pop(call) if response.final else self._calls[call]
                deliver(self._channel.exchange.unpack_response(response))

    def call(self, request: InferenceRequest, decoupled: bool, deliver: Deliver) -> RemoteCall:
        number = next(self._numbers)
        self._calls[number] = deliver
        try:
            packed = self._channel.exchange.pack_request(request, request.trace)  # type: ignore[arg-type]
            self._channel.send(Call(number, packed, decoupled))
        except Exception:
            del self._calls[number]
            raise
        return RemoteCall(self._channel, number)

    def load_model(self, name: str, config: str | None, files: dict[str, bytes] | None) -> None:
        self._ask_for_model("load_model", name, config, files)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._ask_for_model("unload_model", name, bool(unload_dependents))

    def model_ready(self, name: str, version: str) -> bool:
        return bool(self._ask_for_model("model_ready", name, version))

    def metric_family(self, name: str, description: str, kind: str) -> RemoteFamily:
        return RemoteFamily(self, self.ask("metric_family", name, description, kind))

    def ask(self, what: str, *arguments: Any) -> Any:
        """Wait for the server's answer. Raises `ServerError` as it does."""
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._questions[number] = future
        try:
            self._channel.send(Ask(number, what, arguments))
        except Exception:
            del self._questions[number]
            raise
        return future.result()

    def drop(self, handle: int) -> None:
        """Let go of a metric or a family."""
        self._channel.send(Drop(handle))

    def _ask_for_model(self, what: str, *arguments: Any) -> Any:
        try:
            return self.ask(what, *arguments)
        except ServerError as error:
            raise TritonModelException(error.message) from None


class RemoteCall:
    """A request to another model that is under way."""

    def __init__(self, channel: ChildChannel, number: int) -> None:
        self._channel, self._number = channel, number

    def cancel(self) -> None:
        self._channel.send(CancelCall(self._number))


class _RemoteHandle:
    """Something that the server keeps for as long as this object lives."""

    def __init__(self, server: RemoteServer, handle: int) -> None:
        self._server, self._handle = server, handle

    def __del__(self) -> None:
        self._server.drop(self._handle)


class RemoteFamily(_RemoteHandle):
    """A family of metrics."""

    def metric(self, labels: Mapping[str, str] | None, buckets: Sequence[float] | None) -> RemoteMetric:
        # Checked there, where the answer to what is wrong comes from.
        plain = dict(labels) if isinstance(labels, Mapping) else labels
        bounds = None if buckets is None else tuple(float(bound) for bound in buckets)
        return RemoteMetric(self._server, self._server.ask("metric", self._handle, plain, bounds))


class RemoteMetric(_RemoteHandle):
    """A metric whose value is in the server."""

    def increment(self, value: float) -> None:
        self._server.ask("increment", self._handle, float(value))

    def set(self, value: float) -> None:
        self._server.ask("set", self._handle, float(value))

    def observe(self, value: float) -> None:
        self._server.ask("observe", self._handle, float(value))

    def value(self) -> float:
        return float(self._server.ask("value", self._handle))
