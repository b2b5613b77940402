"""Calls from the threads of a Python model to the server, in the same process or in another process."""

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

_local = threading.local()


class Call(Protocol):
    """A BLS call in flight."""

    def cancel(self) -> None:
        """Cancel the request. Thread-safe."""

    def taken(self, size: int) -> None:
        """Account for responses whose `backlog_size` is `size` in total, taken by the calling model. Thread-safe."""


class MetricHandle(Protocol):
    """A metric of the server. Methods raise `ServerError` if the metric's kind does not support them."""

    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...
    def value(self) -> float: ...


class FamilyHandle(Protocol):
    """A metric family of the server. It exists as long as it is referenced."""

    def metric(self, labels: Mapping[str, str] | None, buckets: Sequence[float] | None) -> MetricHandle:
        """Return the metric with these labels. Raises `ServerError`."""


class ServerAccess(ABC):
    """Server functions for the threads of a model. Thread-safe."""

    @property
    @abstractmethod
    def server(self) -> object:
        """An object that identifies the server."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the server has stopped."""

    @abstractmethod
    def call(self, request: InferenceRequest, decoupled: bool, deliver: Deliver) -> Call:
        """Execute a request on another model. `deliver` gets each response, in any thread; the last one is final.

        Responses with a `backlog_size` must be reported to `Call.taken`.
        Errors of the request are delivered as a response. Raises `TritonModelException` if the server has stopped.
        """

    @abstractmethod
    def load_model(self, name: str, config: str | None, files: dict[str, bytes] | None) -> None:
        """Load a model and wait for it. Raises `TritonModelException`."""

    @abstractmethod
    def unload_model(self, name: str, unload_dependents: bool) -> None:
        """Unload a model and wait for it. Raises `TritonModelException`."""

    @abstractmethod
    def model_ready(self, name: str, version: str) -> bool:
        """Return whether a model is ready, including its `is_ready`, if any. Raises `TritonModelException`."""

    @abstractmethod
    def metric_family(self, name: str, description: str, kind: str) -> FamilyHandle:
        """Get or create a metric family; `kind` is "counter", "gauge" or "histogram". Raises `ServerError`."""


_all: weakref.WeakSet[ServerAccess] = weakref.WeakSet()


@contextmanager
def server_access(access: ServerAccess) -> Iterator[None]:
    """Set `access` as the server of the current thread."""
    _all.add(access)
    before = thread_access()
    _local.access = access
    try:
        yield
    finally:
        _local.access = before


def thread_access() -> ServerAccess | None:
    """Return the server of the current thread; None in threads that do not run a model."""
    access: ServerAccess | None = getattr(_local, "access", None)
    return access


def replace_access(access: ServerAccess | None) -> None:
    """Set the server of a process that a model has forked. The objects of its parent cannot be used in it."""
    _all.clear()
    _local.access = access
    if access is not None:
        _all.add(access)


def current_access() -> ServerAccess:
    """Return the server of the current thread; in threads started by a model, the only server of the process.

    Raises `TritonModelException` if there is no server, or several.
    """
    access = thread_access()
    if access is not None:
        return access
    # Stopped servers stay in the set until they are garbage collected.
    servers = {id(known.server): known for known in tuple(_all) if not known.ended}
    if len(servers) == 1:
        return next(iter(servers.values()))
    raise TritonModelException("the server can only be called in the threads that run the model")


_current_loop = threading.local()


class LoopCalls:
    """Calls functions on an event loop, in order, from any thread. Waiting calls wake the loop only once.

    Waking the loop is as expensive as several calls, and the end of a batch posts one call per request.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function soon. Dropped if the loop is closed."""
        self._waiting.append((function, arguments))
        # If `_woken` is set, `_run` has not started to process calls yet and will also process this call.
        if not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._run)
            except RuntimeError:
                logger.debug("a call is dropped: the server's event loop is closed")

    def _run(self) -> None:
        self._woken = False
        waiting = self._waiting
        while waiting:
            function, arguments = waiting.popleft()
            try:
                function(*arguments)
            except Exception:
                logger.exception("a call on the server's event loop failed")


def running_loop_calls() -> LoopCalls:
    """Return the `LoopCalls` of the running event loop."""
    loop = asyncio.get_running_loop()
    known: LoopCalls | None = getattr(_current_loop, "calls", None)
    if known is None or known.loop is not loop:
        known = _current_loop.calls = LoopCalls(loop)
    return known
