"""What a Python model may ask of the server that it runs in, whether it shares a process with it or not."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from neso.backends.python.errors import TritonModelException
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse

logger = logging.getLogger(__name__)


Deliver = Callable[[InferenceResponse], None]

_here = threading.local()


class Call(Protocol):
    """A request to another model that is under way."""

    def cancel(self) -> None:
        """Tell the other model that nobody wants the rest; from any thread."""


class MetricHandle(Protocol):
    """One metric, whose value the server keeps. Its methods raise `ServerError` for what its kind cannot do."""

    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...
    def value(self) -> float: ...


class FamilyHandle(Protocol):
    """A family of metrics, which lives as long as somebody holds it."""

    def metric(self, labels: Mapping[str, str] | None, buckets: Sequence[float] | None) -> MetricHandle:
        """The metric with these labels. Raises `ServerError`."""


class ServerAccess(ABC):
    """The server, for the threads of a model; safe to use from any of them."""

    @property
    @abstractmethod
    def server(self) -> object:
        """The same object for all models of one server."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether that server is gone."""

    @abstractmethod
    def call(self, request: InferenceRequest, decoupled: bool, deliver: Deliver) -> Call:
        """Have another model execute a request; `deliver` gets each response in some thread, the last one is final.

        What goes wrong with the request comes as a response. Raises `TritonModelException` if the server has ended.
        """

    @abstractmethod
    def load_model(self, name: str, config: str | None, files: dict[str, bytes] | None) -> None:
        """Load a model and wait for it. Raises `TritonModelException`, as those below do."""

    @abstractmethod
    def unload_model(self, name: str, unload_dependents: bool) -> None:
        """Unload a model and wait for that."""

    @abstractmethod
    def model_ready(self, name: str, version: str) -> bool:
        """Whether requests for a model are accepted, and the model itself says that it is ready."""

    @abstractmethod
    def metric_family(self, name: str, description: str, kind: str) -> FamilyHandle:
        """The family of that name; `kind` is "counter", "gauge" or "histogram". Raises `ServerError`."""


_all: weakref.WeakSet[ServerAccess] = weakref.WeakSet()


@contextmanager
def server_access(access: ServerAccess) -> Iterator[None]:
    """This thread runs a model of that server."""
    _all.add(access)
    before = getattr(_here, "access", None)
    _here.access = access
    try:
        yield
    finally:
        _here.access = before


def current_access() -> ServerAccess:
    """The server of the model that this thread runs; in a thread that a model made, the only server there is.

    Raises `TritonModelException` where that is not known.
    """
    access: ServerAccess | None = getattr(_here, "access", None)
    if access is not None:
        return access
    # Servers that have ended linger until the garbage collector comes by.
    servers = {id(known.server): known for known in tuple(_all) if not known.ended}
    if len(servers) == 1:
        return next(iter(servers.values()))
    raise TritonModelException("which server to ask is known in the threads that run the model only")


_current_loop = threading.local()


class LoopCalls:
    """Has functions called on an event loop, in order, by any thread; the loop is woken once for those that wait.

    Waking it takes the time of several calls, and a batch of requests ends with one for each of them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call it soon. Of no effect once the loop has ended."""
        self._waiting.append((function, arguments))
        # Whoever finds it set has appended before `_run` takes what waits.
        if not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                logger.debug("a call came after the server's end")

    def _run(self) -> None:
        self._woken = False
        waiting = self._waiting
        while waiting:
            function, arguments = waiting.popleft()
            try:
                function(*arguments)
            except Exception:
                logger.exception("a call on the server's loop failed")


def running_loop_calls() -> LoopCalls:
    """Those of the event loop that runs this thread."""
    loop = asyncio.get_running_loop()
    known: LoopCalls | None = getattr(_current_loop, "calls", None)
    if known is None or known.loop is not loop:
        known = _current_loop.calls = LoopCalls(loop)
    return known
