"""The core of a front-end process: answers from the state of the main process, which does everything else."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.admission import Admission
from neso.server.backend import ModelContext, find_backend
from neso.server.core import Core
from neso.server.errors import ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.loading.loader import backend_settings
from neso.server.loading.model_table import ModelRecord, ModelTable, VersionSlot
from neso.server.log import log_settings
from neso.server.metadata import IndexEntry, ServerMetadata
from neso.server.metrics.custom import CustomMetrics
from neso.server.metrics.latency import ModelLatencies, first_response_histogram
from neso.server.metrics.model_metrics import MODEL_FAMILIES
from neso.server.metrics.registry import MetricsRegistry
from neso.server.model import Model
from neso.server.options import ServerOptions
from neso.server.processes.channel import Channel
from neso.server.processes.forwarding import ForwardedModel, Forwarder
from neso.server.processes.state import ModelDescription, ServerState
from neso.server.processes.totals import ProcessTotals
from neso.server.shared_memory.regions import SharedMemory
from neso.server.statistics import ModelStatistics
from neso.server.trace_config import TraceConfig
from neso.server.tracing import Tracing

logger = logging.getLogger(__name__)

TOTALS_INTERVAL = 1.0
"""Seconds between two reports of what this process has counted; it loses what it counted since when it is killed."""


class SharedModel(Model):
    """A model that this process uses directly, beside the other processes, with its own statistics.

    Requests with tensors go through the main process if they need its state, such as the response cache.
    """

    def __init__(
        self, context: ModelContext, backend: Any, core: FrontEndCore, forwards_tensors: bool
    ) -> None:
        super().__init__(context, backend)
        self._forwarder = core.forwarder
        self._forwards_tensors = forwards_tensors

    def submit(self, request: InferenceRequest) -> ResponseStream:
        if self._forwards_tensors and request.payload is None and not self._retired:
            return self._forwarder.submit(request, self.version, "", streams=self.decoupled)
        return super().submit(request)


class FrontEndCore(Core):
    """The interface that the frontends of a front-end process use, instead of `Core`.

    `admission`: limits that all processes share.
    """

    def __init__(self, options: ServerOptions, admission: Admission) -> None:
        self.options = options
        self.metrics = MetricsRegistry(MODEL_FAMILIES, namespaced=options.model_namespacing)
        self.custom_metrics = CustomMetrics(self.metrics.is_registered)
        self.admission = admission
        self.response_cache = None
        self.shared_memory = SharedMemory(options.allow_client_shm)
        self.rate_limiter = None
        self.tracing = Tracing(TraceConfig())
        self.log = log_settings()
        self.front_ends = None
        self.operations = {}
        self.forwarder = Forwarder(options.max_response_backlog)
        self._table = ModelTable()
        self._models: dict[int, Model] = {}
        self._descriptions: dict[int, ModelDescription] = {}
        self._state: ServerState
        self._applying = asyncio.Lock()
        self._draining: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def channel(self) -> Channel:
        """The channel to the main process."""
        return self.forwarder.channel

    # -- state of the main process ------------------------------------------------------------------------------

    async def apply(self, state: ServerState, news: Iterable[ModelDescription]) -> None:
        """Serve the models of `state`; `news` describes those that were not known before."""
        for description in news:
            self._descriptions[description.key] = description
        async with self._applying:
            known = {slot.key for record in state.records for slot in record.slots if slot.key}
            for key in known - self._models.keys():
                self._models[key] = await self._make_model(self._descriptions[key])
            self._state = state
            self._stopping = state.stopping
            self._table.replace(self._record(record) for record in state.records)
            for key in self._models.keys() - known:
                self._retire(key)
            if state.log != self.log.options:
                self.log.replace(state.log)
            if self.shared_memory.enabled:
                self.shared_memory.follow({region[1][0]: region for region in state.regions})

    def _record(self, description: Any) -> ModelRecord:
        slots = {
            slot.version: VersionSlot(
                slot.state, slot.reason, self._models.get(slot.key), None, slot.unloaded
            )
            for slot in description.slots
        }
        ready = [str(version) for version, slot in slots.items() if slot.model is not None]
        for slot in slots.values():
            if slot.model is not None:
                slot.model.versions = ready
        return ModelRecord(description.id, description.name, slots)

    async def _make_model(self, description: ModelDescription) -> Model:
        config = ModelConfig.FromString(description.config)
        if description.share is None:
            return ForwardedModel(self, description, config)
        metrics = self.options.metrics
        statistics = ModelStatistics(
            description.name,
            description.version,
            ModelLatencies.from_config(metrics),
            first_response_histogram(metrics, config),
        )
        config.response_cache.enable = False
        context = ModelContext(
            core=self,
            name=description.name,
            version=description.version,
            config=config,
            directory=description.directory,
            version_directory=description.version_directory,
            statistics=statistics,
            backend_config=backend_settings(config.backend, self.options),
            namespace=description.namespace,
        )
        backend = find_backend(config.backend, self.options.backend_directory)(context)

        async def attach(*arguments: Any) -> Any:
            return await self.channel.call("attach", description.key, *arguments)

        await backend.connect(description.share, attach)
        return SharedModel(context, backend, self, description.forwards_tensors)

    def _retire(self, key: int) -> None:
        """Route requests to the successor, and release the model when its requests have ended."""
        model = self._models[key]
        try:
            successor: Model | None = self._table.find(model.name, model.version)
        except ServerError:
            successor = None
        model.retire(successor)
        task = asyncio.get_running_loop().create_task(self._release(key, model))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)

    async def _release(self, key: int, model: Model) -> None:
        await model.drain(None)
        if key in self._models:
            await self.send_totals()
            del self._models[key], self._descriptions[key]
            await model.unload(1.0)

    async def drain(self, key: int, timeout: float | None) -> None:
        """Return when a model has no requests in flight and is released, which ends the requests after `timeout`."""
        model = self._models.get(key)
        if model is None:
            return
        await model.drain(timeout)
        if self._models.pop(key, None) is not None:
            del self._descriptions[key]
            await model.unload(1.0)

    def is_ready(self, key: int) -> bool:
        """Return whether a model of the main process accepts requests."""
        return key in self._state.ready_keys

    def totals(self) -> ProcessTotals:
        """Return what this process has counted."""
        models = {
            key: (model.statistics, model.pending_count)
            for key, model in self._models.items()
            if isinstance(model, SharedModel)
        }
        return ProcessTotals(models, self.metrics.counts())

    async def send_totals(self) -> None:
        """Send what this process has counted to the main process."""
        await self.channel.call("totals", self.totals())

    async def report_totals(self) -> None:
        """Send what this process has counted to the main process, every `TOTALS_INTERVAL` if it has changed."""
        reported = b""
        while True:
            await asyncio.sleep(TOTALS_INTERVAL)
            totals = self.totals()
            counted = pickle.dumps(totals)
            if counted != reported:
                reported = counted
                self.channel.notify("totals", totals)

    # -- the interface of `Core` --------------------------------------------------------------------------------

    async def start(self) -> None:
        raise NotImplementedError("the main process loads the models")

    async def stop(self, timeout: float | None = None) -> None:
        self._stopping = True
        for model in list(self._models.values()):
            if isinstance(model, SharedModel):
                await model.unload(timeout)
        self.shared_memory.close()

    def live(self) -> bool:
        return not self._stopping and self._state.live

    def ready(self) -> bool:
        return not self._stopping and self._state.ready

    def metadata(self) -> ServerMetadata:
        return self._state.metadata

    async def check_model_ready(self, name: str, version: str = "", namespace: str = "") -> bool:
        return bool(await self.channel.call("check_model_ready", name, version, namespace))

    async def render_metrics(self) -> bytes:
        return bytes(await self.channel.call("render_metrics"))

    async def model_statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        return list(await self.channel.call("statistics", name, version))

    async def change_trace_settings(
        self, model: str = "", changes: Mapping[str, Sequence[str]] | None = None
    ) -> dict[str, str | list[str]]:
        return dict(await self.channel.call("trace_settings", model, changes))

    async def change_log_settings(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return dict(await self.channel.call("log_settings", changes))

    async def change_shared_memory(self, operation: str, *arguments: Any) -> None:
        await self.channel.call("shared_memory", operation, *arguments)

    async def list_repository(self, ready_only: bool = False) -> list[IndexEntry]:
        return list(await self.channel.call("list_repository", ready_only))

    def repository_index(self, ready_only: bool = False) -> list[IndexEntry]:
        """Return the models that were ever loaded, as of the last change."""
        return [entry for record in self._table for entry in record.entries()]

    async def load_model(
        self, name: str, config: str | None = None, files: dict[str, bytes] | None = None
    ) -> None:
        await self.channel.call("load_model", name, config, files)

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        await self.channel.call("unload_model", name, unload_dependents)

    def remote_stream(self, operation: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Call a streaming operation of the main process."""
        return self.channel.stream(operation, *arguments)
