"""The server core: owns the models, runs on one event loop and is independent of wire formats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import neso
from neso.server.admission import Admission
from neso.server.device_claims import DeviceClaims
from neso.server.errors import InvalidArgument, ServerError, Unavailable, Unsupported
from neso.server.loading.lifecycle import ModelLifecycle
from neso.server.loading.model_control import ModelControl
from neso.server.loading.model_table import ModelRecord, ModelTable
from neso.server.log import log_settings
from neso.server.metadata import IndexEntry, ModelState, ServerMetadata
from neso.server.metrics.custom import CustomMetrics
from neso.server.metrics.machine import MachineMetrics
from neso.server.metrics.model_metrics import KV_CACHE_FAMILY, MODEL_FAMILIES, KvCacheLoad, ModelCollector
from neso.server.metrics.registry import MetricsRegistry
from neso.server.model import Model
from neso.server.options import RateLimitMode, ServerOptions
from neso.server.rate_limiter.limiter import RateLimiter
from neso.server.response_cache.cached_model import open_cache
from neso.server.shared_memory.regions import SharedMemory
from neso.server.trace_config import TRACING_UNSUPPORTED
from neso.server.tracing import Tracing

if TYPE_CHECKING:
    from neso.cluster.stages.hub import StageHub
    from neso.server.processes.front_ends import FrontEnds

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
    """The interface that frontends use. All methods run on the event loop that `start` ran on."""

    def __init__(self, options: ServerOptions, admission: Admission | None = None) -> None:
        self.options = options
        self.metrics = MetricsRegistry(MODEL_FAMILIES, namespaced=options.model_namespacing)
        self.metrics.register(ModelCollector(self.models, options.metrics))
        self.custom_metrics = CustomMetrics(self.metrics.is_registered)
        self.metrics.register(self.custom_metrics)
        self._machine_metrics = MachineMetrics(options.metrics)
        self.metrics.register(self._machine_metrics)
        self.admission = admission or Admission(options.admission)
        self.response_cache = open_cache(options)
        self.devices = DeviceClaims()
        self.shared_memory = SharedMemory(options.allow_client_shm)
        self.rate_limiter = (
            RateLimiter(options.rate_limit_resources)
            if RateLimitMode(options.rate_limit) is not RateLimitMode.OFF
            else None
        )
        self._table = ModelTable()
        self._lifecycle = ModelLifecycle(self, self._table)
        self._control = ModelControl(options, self._table, self._lifecycle)
        self.tracing = Tracing(options.trace)
        self.log = log_settings()
        self.front_ends: FrontEnds | None = None
        """The front-end processes; None if this process serves all connections."""
        self.stages: StageHub | None = None
        """The workers of models that run on workers; created with the first of these models."""
        self.operations: dict[str, Callable[..., Any]] = {}
        """What front-end processes can call, by name; added by the frontends of this process."""
        self.on_lost: Callable[[str], None] = logger.critical
        """Called with the reason when a model has ended that only a new start of the server can load again."""
        self._started = False
        self._stopping = False

    async def start(self) -> None:
        """Load the models. A model that fails to load becomes UNAVAILABLE with a reason.

        Raises `NotFound` for a repository that is not a directory.
        """
        await asyncio.gather(self._machine_metrics.update(), self._control.start())
        self._started = True

    async def stop(self, timeout: float | None = None) -> None:
        """Reject new requests, wait for requests in flight, and unload. Idempotent.

        `timeout`: time for all of this in seconds, by default `exit_timeout`; see `Model.unload`.
        """
        if self._stopping:
            return
        self._stopping = True
        await self._control.stop()
        await self._lifecycle.unload_all(self.options.exit_timeout if timeout is None else timeout)
        if self.stages is not None:
            await self.stages.close()
        if self.response_cache is not None:
            await self.response_cache.close()
        self.shared_memory.close()
        self._machine_metrics.close()
        await self.tracing.close()

    def live(self) -> bool:
        """Return False if the server is stopping, or if a model has failed for good (`Backend.live`)."""
        return not self._stopping and all(model.live() for record in self._table for model in record.models)

    @property
    def stopping(self) -> bool:
        """Whether the server is stopping."""
        return self._stopping

    def ready(self) -> bool:
        """Return whether the server has started and, with `strict_readiness`, every requested model is ready."""
        if not self._started or self._stopping:
            return False
        return not self.options.strict_readiness or self._lifecycle.all_ready()

    def metadata(self) -> ServerMetadata:
        """Name, version and protocol extensions."""
        extensions = [*EXTENSIONS]
        if self.shared_memory.enabled:
            extensions.append("system_shared_memory")
        if self.shared_memory.cuda is not None:
            extensions.append("cuda_shared_memory")
        return ServerMetadata(self.options.server_id, neso.__version__, tuple(extensions))

    def model(self, name: str, version: str = "", namespace: str = "") -> Model:
        """Return the model with this name; version "" selects the newest ready version. Raises `ServerError`.

        `namespace` selects one of several models with the same name.
        """
        if self._stopping:
            raise Unavailable(
                "Server is stopping, scheduler for model has stopped accepting new inference requests"
            )
        return self._table.find(name, version, namespace)

    def model_ready(self, name: str, version: str = "", namespace: str = "") -> bool:
        """Return whether a model accepts requests; False if it is unknown or not loaded."""
        try:
            return self.model(name, version, namespace).ready()
        except ServerError:
            return False

    async def check_model_ready(self, name: str, version: str = "", namespace: str = "") -> bool:
        """Like `model_ready`, but also run the model's own readiness check if it has one."""
        try:
            return await self.model(name, version, namespace).check_ready()
        except ServerError:
            return False

    def models(self) -> list[Model]:
        """Return all ready model versions."""
        records = sorted(self._table, key=lambda record: record.id)
        return [model for record in records for model in record.models]

    def records(self) -> list[ModelRecord]:
        """Return the table of models, in the order of their first load."""
        return list(self._table)

    async def model_statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """Return `ModelStatistics` of a version, of all ready versions of a model, or of all models."""
        if not name:
            models = self.models()
        elif version:
            models = [self.model(name, version)]
        else:
            model = self.model(name)
            models = [self.model(model.name, each) for each in model.versions]
        await self._collect_totals()
        return [model.total_statistics.snapshot() for model in models]

    async def render_metrics(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        await asyncio.gather(self._machine_metrics.update(), self._collect_totals())
        return await self.metrics.render_in_turns()

    def kv_cache_load(self) -> KvCacheLoad | None:
        """Return the KV-cache utilization of the language models; None if no model reports it."""
        samples = self.metrics.samples(KV_CACHE_FAMILY.name) or self.custom_metrics.samples(
            KV_CACHE_FAMILY.name
        )
        return KvCacheLoad.from_samples(samples)

    def trace_settings(
        self, model: str = "", changes: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, str | list[str]]:
        """Apply `changes` and return the trace settings of a model, or the global settings. Raises `ServerError`."""
        if model and not self.model_ready(model):
            raise InvalidArgument(f"Request for unknown model : {model}")
        if changes:
            self.tracing.update(changes, model)
        return self.tracing.settings(model)

    async def change_trace_settings(
        self, model: str = "", changes: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, str | list[str]]:
        """Like `trace_settings`, for all processes of the server. Raises `ServerError`."""
        if changes and self.front_ends is not None:
            raise Unsupported(TRACING_UNSUPPORTED)
        return self.trace_settings(model, changes)

    async def change_log_settings(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Apply `changes` in all processes and return the log settings. Raises `ServerError`."""
        if changes:
            self.log.update(changes)
            await self._synchronize()
        return self.log.settings()

    async def change_shared_memory(self, operation: str, *arguments: Any) -> None:
        """Call a method of `shared_memory` that registers or removes regions, for all processes."""
        getattr(self.shared_memory, operation)(*arguments)
        await self._synchronize()

    async def list_repository(self, ready_only: bool = False) -> list[IndexEntry]:
        """Like `repository_index`, in any process."""
        return self.repository_index(ready_only)

    async def _synchronize(self) -> None:
        """Return when all front-end processes serve the current state."""
        if self.front_ends is not None:
            await self.front_ends.synchronize()

    async def _collect_totals(self) -> None:
        """Add the statistics and metrics of the front-end processes."""
        if self.front_ends is None:
            return
        await self.front_ends.collect()
        self.metrics.elsewhere = self.front_ends.totals.samples

    def repository_index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Return the models in the repositories and models loaded from elsewhere, with their states."""
        entries = self._control.index()
        return [entry for entry in entries if entry.state is ModelState.READY or not ready_only]

    async def load_model(
        self, name: str, config: str | None = None, files: dict[str, bytes] | None = None
    ) -> None:
        """Load a model, or reload it if its files have changed.

        `config` (JSON) replaces config.pbtxt; `files`, by path, replace the model's folder. If it raises `ServerError`,
        the previous version stays loaded.
        """
        try:
            await self._control.load(name, config, files)
        finally:
            await self._synchronize()

    async def require_model(self, name: str, namespace: str = "") -> None:
        """Load a dependency of a model in `namespace`, unless it is already loaded. Raises `ServerError`."""
        await self._control.require(name, namespace)

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model once its requests in flight have ended. No effect if it is not loaded.

        With `unload_dependents`, also unload an ensemble's step models that were not loaded by name and are not needed
        by another model.
        """
        try:
            await self._control.unload(name, unload_dependents)
        finally:
            await self._synchronize()

    def add_model(self, name: str, config: Any, directory: Path) -> None:
        """Add a model whose folder is not in a repository. Loaded by `start` or `load_model`."""
        self._control.add(name, config, directory)

    async def poll_repositories(self) -> None:
        """Poll the repositories now, and load and unload accordingly. Raises `Unavailable` unless in mode POLL."""
        await self._control.poll()

    async def register_repository(self, uri: str | Path, mapping: dict[str, str] | None = None) -> None:
        """Add a model repository. `mapping`: model name to folder name, for models where these differ.

        Raises `Unsupported` unless in mode EXPLICIT, `AlreadyExists`, `InvalidArgument`.
        """
        await self._control.register(uri, mapping)

    async def unregister_repository(self, uri: str | Path) -> None:
        """Remove a model repository; loaded models stay. Raises `Unsupported`, `InvalidArgument`."""
        await self._control.unregister(uri)
