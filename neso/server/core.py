"""The server's core: owns the models, lives on one event loop, knows no wire format."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import neso
from neso.server.custom_metrics import CustomMetrics
from neso.server.errors import InternalError, InvalidArgument, NotFound, ServerError, Unavailable
from neso.server.lifecycle import ModelLifecycle
from neso.server.loader import ModelSource, override_source
from neso.server.log import log_settings
from neso.server.metadata import IndexEntry, ModelState, ServerMetadata
from neso.server.metrics import MetricsRegistry, ModelCollector
from neso.server.model import Model
from neso.server.options import ModelControlMode, ServerOptions
from neso.server.repository import ModelRepository, check_model_name
from neso.server.response_cache import ResponseCache
from neso.server.shared_memory.manager import SharedMemory
from neso.server.tracing import Tracing

logger = logging.getLogger(__name__)

EXTENSIONS = (
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "binary_tensor_data",
    "classification",
    "parameters",
    "schedule_policy",
    "sequence",
    "statistics",
    "trace",
    "logging",
)


class Core:
    """Everything a front end may ask for. All methods belong to the event loop that `start` ran on."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.metrics = MetricsRegistry()
        self.metrics.register(ModelCollector(self.models))
        self.custom_metrics = CustomMetrics(self.metrics.taken)
        self.metrics.register(self.custom_metrics)
        self.response_cache = (
            ResponseCache(options.response_cache_size) if options.response_cache_size else None
        )
        self.shared_memory = SharedMemory(options.allow_client_shm)
        self.tracing = Tracing(options.trace)
        self.log = log_settings()
        self._repository = ModelRepository(options.model_repository)
        self._lifecycle = ModelLifecycle(self)
        self._added: dict[str, ModelSource] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._started = False
        self._stopping = False

    async def start(self) -> None:
        """Load the models. One that fails becomes UNAVAILABLE with the reason, and the server goes on.

        Raises `NotFound` for a repository that is no directory.
        """
        self._repository.check()
        names = await asyncio.to_thread(self._startup_names)
        await asyncio.gather(*(self._load_at_start(name) for name in names))
        self._started = True

    async def stop(self) -> None:
        """Refuse new requests, wait for those in flight (`exit_timeout`), and unload. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        for task in tuple(self._loads):
            task.cancel()
        if self._loads:
            await asyncio.wait(tuple(self._loads))
        await self._lifecycle.unload_all(self.options.exit_timeout)
        self.shared_memory.close()
        await self.tracing.close()

    def live(self) -> bool:
        """Whether the server can answer at all."""
        return not self._stopping

    def ready(self) -> bool:
        """Whether the server has started and, if `strict_readiness`, every model that was to be loaded is."""
        if not self._started or self._stopping:
            return False
        return not self.options.strict_readiness or self._lifecycle.all_ready()

    def metadata(self) -> ServerMetadata:
        """Name, version and extensions."""
        extensions = (*EXTENSIONS, "system_shared_memory") if self.shared_memory.enabled else EXTENSIONS
        return ServerMetadata(self.options.server_id, neso.__version__, extensions)

    def model(self, name: str, version: str = "") -> Model:
        """The model that serves a name; version "" is the newest that is ready. Raises `ServerError`."""
        if self._stopping:
            raise Unavailable(
                "Server is stopping, scheduler for model has stopped accepting new inference requests"
            )
        return self._lifecycle.find(name, version)

    def model_ready(self, name: str, version: str = "") -> bool:
        """Whether requests for a model are accepted; not for one that is unknown, or not loaded."""
        try:
            return self.model(name, version).ready()
        except ServerError:
            return False

    def models(self) -> list[Model]:
        """All versions that are ready."""
        return list(self._lifecycle.models())

    def trace_settings(
        self, model: str = "", changes: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, str | list[str]]:
        """The trace settings of a model, or the global ones, after `changes`. Raises `ServerError`."""
        if model and not self.model_ready(model):
            raise InvalidArgument(f"Request for unknown model : {model}")
        if changes:
            self.tracing.update(changes, model)
        return self.tracing.settings(model)

    def repository_index(self, ready_only: bool = False) -> list[IndexEntry]:
        """The models of the repositories and those that were loaded from elsewhere, with their states."""
        names = {*self._repository.names(), *self._added, *self._lifecycle.names}
        entries = [entry for name in sorted(names) for entry in self._lifecycle.entries(name)]
        return [entry for entry in entries if entry.state is ModelState.READY or not ready_only]

    async def load_model(
        self, name: str, config: str | None = None, files: dict[str, bytes] | None = None
    ) -> None:
        """Load a model, or replace it when it is loaded.

        `config` is JSON in place of config.pbtxt, `files` are by path, in place of the model's folder.
        Raises `ServerError`; what was loaded before stays then.
        """
        self._check_control()
        check_model_name(name)
        directory: Path | None = None
        if not files:
            try:
                directory = self._source(name).directory
            except NotFound:
                raise InternalError(
                    f"failed to load '{name}', failed to poll from model repository: it holds no such model"
                ) from None
        if config is None and not files:
            source = self._source(name)
        else:
            source = await asyncio.to_thread(override_source, name, directory, config, files)
        await self._load(source)

    async def require_model(self, name: str) -> None:
        """Load a model that another one needs, unless it is loaded. Raises `ServerError`."""
        await self._lifecycle.require(self._source(name))

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model once its requests in flight have ended. One that is not loaded stays so.

        With `unload_dependents` the models of an ensemble's steps go with it, but for those that another one needs.
        """
        self._check_control()
        needed = {step for model in self.models() if model.name == name for step in model.dependencies}
        await asyncio.shield(asyncio.ensure_future(self._lifecycle.unload(name, self.options.unload_timeout)))
        for step in sorted(needed) if unload_dependents else ():
            if not any(step in model.dependencies for model in self.models()):
                await self.unload_model(step, unload_dependents=True)

    def add_model(self, name: str, config: Any, directory: Path) -> None:
        """Serve a folder that is in no repository. Loaded by `start` or `load_model`."""
        check_model_name(name)
        self._added[name] = ModelSource(name, Path(directory), config)

    def _source(self, name: str) -> ModelSource:
        return self._added.get(name) or ModelSource(name, self._repository.find(name))

    def _startup_names(self) -> list[str]:
        if self.options.model_control_mode is ModelControlMode.NONE or self.options.startup_models == ("*",):
            return sorted({*self._repository.names(), *self._added})
        return sorted({*self.options.startup_models, *self._added})

    async def _load_at_start(self, name: str) -> None:
        try:
            source = self._source(name)
        except ServerError as error:
            self._lifecycle.fail(name, error.message)
            logger.error("failed to load model '%s': %s", name, error.message)
            return
        try:
            # Maybe an ensemble has had it loaded already.
            await self._in_task(source, self._lifecycle.require(source))
        except ServerError as error:
            logger.error("failed to load model '%s': %s", name, error.message)

    async def _load(self, source: ModelSource) -> None:
        await self._in_task(source, self._lifecycle.load(source))

    async def _in_task(self, source: ModelSource, load: Coroutine[Any, Any, None]) -> None:
        """Load in a task of its own: a client that goes away does not stop it, the end of the server does."""
        if self._stopping:
            load.close()
            raise Unavailable("Server is stopping, no model is loaded any more")
        task = asyncio.get_running_loop().create_task(load)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Unavailable(f"failed to load '{source.name}', the server is stopping") from None

    def _check_control(self) -> None:
        if self._stopping:
            raise Unavailable("Server is stopping, no model is loaded any more")
        if self.options.model_control_mode is not ModelControlMode.EXPLICIT:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
