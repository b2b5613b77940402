"""Calls to the server from processes that a model forks, for example with `multiprocessing.Pool`.

The threads that connect a model to its server do not exist in a forked process. Therefore each fork in a thread of a
model creates a pipe, and a thread of the parent executes the calls that it receives through the pipe.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection, Pipe
from typing import Any

from neso.backends.python.errors import TritonModelException
from neso.backends.python.server_access import (
    Call,
    Deliver,
    FamilyHandle,
    ServerAccess,
    replace_access,
    thread_access,
)
from neso.server.errors import InternalError, Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse

_forks = threading.local()
_relays: set[Relay] = set()
_installed = threading.Lock()


def install() -> None:
    """Let models call the server in processes that they fork. Idempotent."""
    if _installed.acquire(blocking=False):  # never released
        os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)


def _before_fork() -> None:
    access = thread_access()
    _forks.pending = None if access is None else (Pipe(), access)


def _in_parent() -> None:
    if _forks.pending is not None:
        (ours, theirs), access = _forks.pending
        theirs.close()
        Relay(access, ours).start()


def _in_child() -> None:
    for relay in tuple(_relays):
        relay.connection.close()
    _relays.clear()
    if _forks.pending is None:
        replace_access(None)
    else:
        (theirs, ours), _ = _forks.pending
        theirs.close()
        replace_access(ForkedAccess(ours))


class Relay:
    """Executes the calls of one forked process, in threads of its parent. Ends with the process."""

    def __init__(self, access: ServerAccess, connection: Connection) -> None:
        self.connection = connection
        self._access = access
        self._sending = threading.Lock()
        self._calls: dict[int, Call] = {}

    def start(self) -> None:
        _relays.add(self)
        threading.Thread(target=self._run, name="forked-process", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                kind, *arguments = self.connection.recv()
                getattr(self, f"_{kind}")(*arguments)
        except (EOFError, OSError):
            pass  # the process has ended
        finally:
            _relays.discard(self)
            for call in tuple(self._calls.values()):
                call.cancel()
            self.connection.close()

    def _call(self, number: int, request: InferenceRequest, decoupled: bool) -> None:
        responses: queue.SimpleQueue[InferenceResponse] = queue.SimpleQueue()
        try:
            self._calls[number] = self._access.call(request, decoupled, responses.put)
        except TritonModelException as error:
            responses.put(InferenceResponse("", "", error=InternalError(str(error)), final=True))
        # Responses are sent by another thread: `deliver` must not wait until the process reads them.
        threading.Thread(
            target=self._send_responses, args=(number, responses), name="forked-process-call", daemon=True
        ).start()

    def _send_responses(self, number: int, responses: queue.SimpleQueue[InferenceResponse]) -> None:
        final = False
        while not final:
            response = responses.get()
            final = response.final
            self._send(
                *("response", number, response.outputs, response.parameters, response.error),
                *(final, response.backlog_size),
            )
        self._calls.pop(number, None)

    def _cancel(self, number: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.cancel()

    def _taken(self, number: int, size: int) -> None:
        call = self._calls.get(number)
        if call is not None:
            call.taken(size)

    def _query(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._send("reply", number, getattr(self._access, method)(*arguments), None)
        except TritonModelException as error:
            self._send("reply", number, None, str(error))

    def _send(self, *message: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # the process has ended
            self.connection.send(message)


class ForkedAccess(ServerAccess):
    """The server, for a forked process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, Deliver] = {}
        self._queries: dict[int, Future[Any]] = {}
        self._reader: threading.Thread | None = None
        self._closed = False

    @property
    def server(self) -> object:
        return self

    @property
    def ended(self) -> bool:
        return self._closed

    def call(self, request: InferenceRequest, decoupled: bool, deliver: Deliver) -> ForkedCall:
        request.trace = None  # belongs to the parent
        number = next(self._numbers)
        self._calls[number] = deliver
        self.send("call", number, request, decoupled)
        return ForkedCall(self, number)

    def load_model(self, name: str, config: str | None, files: dict[str, bytes] | None) -> None:
        self._query("load_model", name, config, files)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._query("unload_model", name, unload_dependents)

    def model_ready(self, name: str, version: str) -> bool:
        return bool(self._query("model_ready", name, version))

    def metric_family(self, name: str, description: str, kind: str) -> FamilyHandle:
        raise TritonModelException(
            "metrics can only be used in the process that runs the model, not in forks"
        )

    def send(self, *message: Any) -> None:
        """Send a message to the parent. Raises `TritonModelException` if it has ended."""
        with self._sending:
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, name="server", daemon=True)
                self._reader.start()
            try:
                self._connection.send(message)
            except OSError:
                raise TritonModelException("the process that runs the model has ended") from None

    def _query(self, method: str, *arguments: Any) -> Any:
        number, answer = next(self._numbers), Future[Any]()
        self._queries[number] = answer
        self.send("query", number, method, arguments)
        return answer.result()

    def _read(self) -> None:
        try:
            while True:
                kind, number, *values = self._connection.recv()
                if kind == "reply":
                    value, error = values
                    answer = self._queries.pop(number)
                    if error is None:
                        answer.set_result(value)
                    else:
                        answer.set_exception(TritonModelException(error))
                else:
                    outputs, parameters, error, final, size = values
                    response = InferenceResponse(
                        "", "", "", outputs, parameters, error, final, backlog_size=size
                    )
                    (self._calls.pop if final else self._calls.__getitem__)(number)(response)
        except (EOFError, OSError):
            self._fail_all()

    def _fail_all(self) -> None:
        self._closed = True
        ended = "the process that runs the model has ended"
        # Other threads can add calls meanwhile: sending the message of such a call fails.
        while self._queries:
            self._queries.popitem()[1].set_exception(TritonModelException(ended))
        while self._calls:
            self._calls.popitem()[1](InferenceResponse("", "", error=Unavailable(ended), final=True))


class ForkedCall:
    """A BLS call of a forked process."""

    def __init__(self, access: ForkedAccess, number: int) -> None:
        self._access, self._number = access, number

    def cancel(self) -> None:
        self._access.send("cancel", self._number)

    def taken(self, size: int) -> None:
        self._access.send("taken", self._number, size)
