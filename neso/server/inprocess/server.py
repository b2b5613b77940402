"""The in-process server: a core on an event loop in a separate thread."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # a different class before Python 3.11
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


class Frontend(Protocol):
    """A frontend that runs on the server's event loop."""

    async def stop(self, grace: float) -> None:
        """Wait up to `grace` seconds for requests in flight, then close."""


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Server:
    """Serves models in this process, and to clients through frontends such as `neso.KServeHttp`.

    Takes `Options`, or its fields as keywords. As a context manager it starts, waits for the models, and stops.
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
        self._lock = threading.Lock()  # no work is submitted to the loop after `stop`
        self._running = False
        self._starting: Future[None] | None = None
        self._frontends: list[Frontend] = []
        self.in_flight: set[InFlightRequest] = set()  # used on the loop only

    def start(self, wait_until_ready: bool = False, timeout: float | None = None) -> Server:
        """Start loading the models; with `wait_until_ready`, wait until each model is loaded or has failed.

        Raises `NotFound` for a repository that is not a directory, `TimeoutError` after `timeout` seconds.
        """
        if self._starting is not None:
            raise Unavailable("an in-process server can be started once")
        self._thread.start()
        self._running = True
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
        """Wait for requests in flight (up to `exit_timeout`), unload the models and end the thread. Idempotent."""
        with self._lock:
            was_open, self._running = self._running, False
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
        """Return whether the server is running."""
        return self._running and self.core.live()

    def ready(self) -> bool:
        """Return whether the requested models are ready."""
        return self._running and self.core.ready()

    def metadata(self) -> ServerMetadata:
        """Return name, version and protocol extensions."""
        return self.call(lambda core: core.metadata())

    def metrics(self) -> str:
        """Return all metrics in the Prometheus text format."""
        return self.wait_for(self.core.render_metrics()).decode()

    def metric_family(self, name: str, description: str, kind: MetricKind) -> MetricFamily:
        """Return a custom metric family, created by the first call. It exists as long as it is referenced.

        Raises `InvalidArgument` for an invalid name, `AlreadyExists` if the name has another kind.
        """
        return self.core.custom_metrics.family(name, description, kind)

    def model(self, name: str, version: str | int = "") -> Model:
        """Return a loaded model; version "" selects the newest. Raises `ServerError` if it is not loaded."""
        self.call(lambda core: core.model(name, str(version)))
        return Model(self, name, str(version))

    def models(self, ready_only: bool = False) -> Models:
        """Return the models of the repositories by name and version, with their states."""
        return Models(self, self.index(ready_only))

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Return the models of the repositories, with state and reason."""
        return self.call(lambda core: core.repository_index(ready_only))

    def load(self, name: str, config: str | None = None, files: dict[str, bytes] | None = None) -> Model:
        """Load or reload a model, in model control mode `explicit`. Raises `ServerError`."""
        self.wait_for(self.core.load_model(name, config, files))
        return Model(self, name)

    def unload(self, model: str | Model, unload_dependents: bool = False) -> None:
        """Unload a model after its requests in flight have ended, in model control mode `explicit`."""
        name = model.name if isinstance(model, Model) else model
        self.wait_for(self.core.unload_model(name, unload_dependents))

    def register_model_repository(
        self, path: str | PathLike[str], name_mapping: dict[str, str] | None = None
    ) -> None:
        """Add a model repository (directory or URI), in model control mode `explicit`.

        `name_mapping`: folder name to model name, for models where these differ. Raises `ServerError`.
        """
        folders = {name: folder for folder, name in (name_mapping or {}).items()}
        self.wait_for(self.core.register_repository(_uri(path), folders))

    def unregister_model_repository(self, path: str | PathLike[str]) -> None:
        """Remove a model repository; loaded models stay. Raises `ServerError`."""
        self.wait_for(self.core.unregister_repository(_uri(path)))

    def poll_model_repository(self) -> None:
        """Poll the repositories now, in model control mode `poll`."""
        self.wait_for(self.core.poll_repositories())

    def attach(self, frontend: Frontend) -> None:
        """Register a frontend, which will be stopped before the server."""
        self._frontends.append(frontend)

    def detach(self, frontend: Frontend) -> None:
        """Remove a frontend; no effect if it is not registered."""
        if frontend in self._frontends:
            self._frontends.remove(frontend)

    def running_core(self) -> Core:
        """Return the core. Raises `Unavailable` if the server is not running."""
        if not self._running:
            raise Unavailable("the server is not running")
        return self.core

    def call(self, function: Callable[[Core], Result]) -> Result:
        """Run `function(core)` on the server's loop and wait for its result."""

        async def run() -> Result:
            return function(self.core)

        return self.wait_for(run())

    def wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the server's loop and wait for it. Raises `Unavailable` if the server has stopped."""
        try:
            self.check_may_wait()
        except RuntimeError:
            work.close()
            raise
        with self._lock:
            if not self._running:
                work.close()
                raise Unavailable("the server is not running")
            result = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return result.result()
        except CancelledError:
            raise Unavailable("the server has stopped") from None

    def check_may_wait(self) -> None:
        """Raise `RuntimeError` in the server's thread, which would deadlock."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the server's own thread must not wait for itself")

    def post(self, callback: Callable[[], None]) -> None:
        """Schedule a callback on the server's loop. Raises `Unavailable` if the server has stopped."""
        with self._lock:
            if not self._running:
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
            stopped = (frontend.stop(grace) for frontend in self._frontends)
            for error in await asyncio.gather(*stopped, return_exceptions=True):
                if error is not None:
                    logger.error("a frontend did not stop cleanly", exc_info=error)
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
    except ImportError:  # not available on Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
