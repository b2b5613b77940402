"""The in-process server: a core on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from neso.server.core import Core
from neso.server.errors import Unavailable
from neso.server.inprocess.model import Model
from neso.server.metadata import IndexEntry, ServerMetadata
from neso.server.options import ModelControlMode, ServerOptions

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Server:
    """Serves models to this process; front ends can be put on its `loop` and `core`.

    Takes a `ServerOptions`, or its fields as keywords; `model_repository` may then be one path or several.
    A context manager: starts, waits for the models, and stops.
    """

    def __init__(
        self,
        options: ServerOptions | None = None,
        *,
        model_repository: str | PathLike[str] | Iterable[str | PathLike[str]] = (),
        model_control_mode: ModelControlMode | str = ModelControlMode.NONE,
        **fields: Any,
    ) -> None:
        if options is None:
            if isinstance(model_repository, str | PathLike):
                model_repository = (model_repository,)
            options = ServerOptions(
                model_repository=tuple(Path(path) for path in model_repository),
                model_control_mode=ModelControlMode(model_control_mode),
                **fields,
            )
        self.core = Core(options)
        self.loop = _new_event_loop()
        self._thread = threading.Thread(target=self._run, name="neso-server", daemon=True)
        self._gate = threading.Lock()  # no work reaches the loop after stop has closed it
        self._open = False
        self._starting: Future[None] | None = None

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

    def model(self, name: str, version: str | int = "") -> Model:
        """A model that is loaded; version "" is the newest. Raises `ServerError` if there is none."""
        self.call(lambda core: core.model(name, str(version)))
        return Model(self, name, str(version))

    def models(self) -> list[Model]:
        """All versions that are ready."""
        return self.call(lambda core: [Model(self, model.name, model.version) for model in core.models()])

    def index(self, ready_only: bool = False) -> list[IndexEntry]:
        """The models of the repositories, with state and reason."""
        return self.call(lambda core: core.repository_index(ready_only))

    def load(self, name: str, config: str | None = None, files: dict[str, bytes] | None = None) -> Model:
        """Load or reload a model, in model control mode `explicit`. Raises `ServerError`."""
        self.wait_for(self.core.load_model(name, config, files))
        return Model(self, name)

    def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model when its requests in flight have ended, in model control mode `explicit`."""
        self.wait_for(self.core.unload_model(name, unload_dependents))

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
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the server's own thread must not wait for itself")
        with self._gate:
            if not self._open:
                work.close()
                raise Unavailable("the server is not running")
            result = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return result.result()
        except CancelledError:
            raise Unavailable("the server has stopped") from None

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
            await self.core.stop()
            await asyncio.sleep(0)  # iterators get their last responses
            this = asyncio.current_task()
            rest = [task for task in asyncio.all_tasks() if task is not this]
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)
        except Exception:
            logger.exception("the server did not stop cleanly")
        finally:
            self.loop.call_soon(self.loop.stop)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
