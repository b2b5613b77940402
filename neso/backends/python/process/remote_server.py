"""The server for a model in a process of its own: each question is a message, and waits for its answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from neso.backends.python.errors import TritonModelException
from neso.backends.python.process.child_channel import ChildChannel
from neso.backends.python.process.exchange import unpack_error
from neso.backends.python.process.messages import Answer, Ask, Call, CallResponse, CancelCall, Drop, Message
from neso.backends.python.server_access import Deliver, ServerAccess
from neso.server.errors import ServerError
from neso.server.inference_request import InferenceRequest


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
