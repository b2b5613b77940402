"""The in-process server: a core on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from neso.server.core import Core
from neso.server.errors import Unavailable
from neso.server.inprocess.model import Model, Models
from neso.server.inprocess.requests import InFlightRequest
from neso.server.metadata import IndexEntry, ServerMetadata
from neso.server.metrics.custom import CustomFamily as MetricFamily
from neso.server.metrics.custom import MetricKind
from neso.server.options import ServerOptions


class FrontEnd(Protocol):
    """Serves clients on a server's loop."""

    async def stop(self, grace: float) -> None:
        """Let requests in flight end within `grace` seconds, then close."""


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Server:
    """Serves models to this process, and through front ends (`neso.KServeHttp` and others) to clients.

    Takes an `Options`, or its fields as keywords. A context manager: starts, waits for the models, and stops.
    """

    def __init__(self, options: ServerOptions | None = None, **fields: Any) -> None:
        if options is None:
            options = ServerOptions(**fields)
        elif fields:
            raise TypeError("Server() takes options as an object or as keywords, not both")
        self.options = options
        self.core = Core(options)
        self.loop = _new_event_loop()
        self._thread = threading.Thread(target=self._run, name="neso-server", daemon=True)
        self._gate = threading.Lock()  # no work reaches the loop after stop has closed it
        self._open = False
        self._starting: Future[None] | None = None
        self._front_ends: list[FrontEnd] = []
        self.in_flight: set[InFlightRequest] = set()  # belongs to the loop

    def start(self, wait_until_ready: bool = False, timeout: float | None = None) -> Server:
        """Start to load the models; `wait_until_ready`: until each has been loaded or has failed.

        Raises `NotFound` for a repository that is no directory, `TimeoutError` after `timeout` seconds.
        """
        if self._starting is not None:
            raise Unavailable("an in-process server can be started once")
        self._thread.start()
        self._open = True
        self._starting = asyncio.run_coroutine_threadsafe(self.core.start(), self.loop)
        if wait_until_ready:
            try:
                self._starting.result(timeout)
            except FutureTimeoutError:
                self.stop()
                raise TimeoutError(f"the models were not loaded within {timeout} s") from None
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Let requests in flight end (up to `exit_timeout`), unload the models, end the thread. Idempotent."""
        with self._gate:
            was_open, self._open = self._open, False
        if not was_open:
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join()
            return
        asyncio.run_coroutine_threadsafe(self._shut_down(), self.loop)
        self._thread.join()

    def __enter__(self) -> Server:
        return self.start(wait_until_ready=True) if self._starting is None else self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def live(self) -> bool:
        """Whether the server answers."""
        return self._open and self.core.live()

    def ready(self) -> bool:
        """Whether the models that were to be loaded can be used."""
        return self._open and self.core.ready()

    def metadata(self) -> ServerMetadata:
        """Name, version and extensions."""
        return self.call(lambda core: core.metadata())

    def metrics(self) -> str:
        """All metrics, in Prometheus' text format."""
        return self.wait_for(self.core.render_metrics()).decode()

    def metric_family(self, name: str, description: str, kind: MetricKind) -> MetricFamily:
        """A family of metrics that `metrics` shows, made by the first who asks; lives while somebody holds it.

        Raises `InvalidArgument` for a bad name, `AlreadyExists` where the name has another kind.
        """
        return self.core.custom_metrics.family(name, description, kind)

    def model(self, name: str, version: str | int = "") -> Model:
        """A model that is loaded; version "" is the newest. Raises `ServerError` if there is none."""
        self.call(lambda core: core.model(name, str(version)))
        return Model(self, name, str(version))

    def models(self, ready_only: bool = False) -> Models:
        """The models of the repositories by name and version, and what is known of their state."""
        return Models(self, self.index(ready_only))

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """The models of the repositories, with state and reason."""
        return self.call(lambda core: core.repository_index(ready_only))

    def load(self, name: str, config: str | None = None, files: dict[str, bytes] | None = None) -> Model:
        """Load or reload a model, in model control mode `explicit`. Raises `ServerError`."""
        self.wait_for(self.core.load_model(name, config, files))
        return Model(self, name)

    def unload(self, model: str | Model, unload_dependents: bool = False) -> None:
        """Unload a model when its requests in flight have ended, in model control mode `explicit`."""
        name = model.name if isinstance(model, Model) else model
        self.wait_for(self.core.unload_model(name, unload_dependents))

    def register_model_repository(
        self, path: str | PathLike[str], name_mapping: dict[str, str] | None = None
    ) -> None:
        """Add a model repository, in model control mode `explicit`: a directory, or a URI.

        `name_mapping` has the names of models by folder, where they are to have others. Raises `ServerError`.
        """
        folders = {name: folder for folder, name in (name_mapping or {}).items()}
        self.wait_for(self.core.register_repository(_uri(path), folders))

    def unregister_model_repository(self, path: str | PathLike[str]) -> None:
        """Forget a model repository; models that are loaded stay. Raises `ServerError`."""
        self.wait_for(self.core.unregister_repository(_uri(path)))

    def poll_model_repository(self) -> None:
        """Load and unload by what the repositories hold, now, in model control mode `poll`."""
        self.wait_for(self.core.poll_repositories())

    def attach(self, front_end: FrontEnd) -> None:
        """Have a front end that was started on the loop stopped before the server is."""
        self._front_ends.append(front_end)

    def detach(self, front_end: FrontEnd) -> None:
        """Forget a front end; one that is not attached stays so."""
        if front_end in self._front_ends:
            self._front_ends.remove(front_end)

    def running_core(self) -> Core:
        """The core. Raises `Unavailable` when the server does not run."""
        if not self._open:
            raise Unavailable("the server is not running")
        return self.core

    def call(self, ask: Callable[[Core], Result]) -> Result:
        """Run `ask(core)` on the server's loop and wait for its result."""

        async def asked() -> Result:
            return ask(self.core)

        return self.wait_for(asked())

    def wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the server's loop and wait for it. Raises `Unavailable` when that has stopped."""
        try:
            self.check_may_wait()
        except RuntimeError:
            work.close()
            raise
        with self._gate:
            if not self._open:
                work.close()
                raise Unavailable("the server is not running")
            result = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return result.result()
        except CancelledError:
            raise Unavailable("the server has stopped") from None

    def check_may_wait(self) -> None:
        """Raises `RuntimeError` in the server's own thread, which would wait for itself for ever."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the server's own thread must not wait for itself")

    def post(self, callback: Callable[[], None]) -> None:
        """Run a callback on the server's loop, some time soon. Raises `Unavailable` when that has stopped."""
        with self._gate:
            if not self._open:
                raise Unavailable("the server is not running")
            self.loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    async def _shut_down(self) -> None:
        try:
            if self._starting is not None and not self._starting.done():
                self._starting.cancel()
            grace = self.options.exit_timeout
            stopped = (front_end.stop(grace) for front_end in self._front_ends)
            for error in await asyncio.gather(*stopped, return_exceptions=True):
                if error is not None:
                    logger.error("a front end did not stop cleanly", exc_info=error)
            await self.core.stop()
            for request in tuple(self.in_flight):
                request.fail(Unavailable("the server has stopped"))
            this = asyncio.current_task()
            rest = [task for task in asyncio.all_tasks() if task is not this]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
        except Exception:
            logger.exception("the server did not stop cleanly")
        finally:
            self.loop.call_soon(self.loop.stop)


def _uri(path: str | PathLike[str]) -> str | Path:
    return path if isinstance(path, str) else Path(path)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
