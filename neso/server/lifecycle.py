"""Models come and go: load, replace, unload, and in which state every version is."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neso.server.backend import ModelContext
from neso.server.errors import InternalError, InvalidArgument, NotFound, ServerError, Unavailable
from neso.server.loader import ModelPlan, ModelSource, plan_model
from neso.server.metadata import IndexEntry, ModelState
from neso.server.metrics.model_latencies import ModelLatencies, first_response_histogram
from neso.server.model import Model
from neso.server.repository import find_versions
from neso.server.statistics import ModelStatistics
from neso.server.warmup import warm_up

if TYPE_CHECKING:
    from neso.server.core import Core

logger = logging.getLogger(__name__)

UNLOADED = "unloaded"
_MOST_DIGITS = 20  # of a version; Python refuses to read numbers of some thousands

# The model that this task is loading: what it loads besides, that one waits for.
_being_loaded: ContextVar[str] = ContextVar("model that is being loaded", default="")


@dataclass(slots=True)
class VersionSlot:
    """What is known of one version of a model that was touched. `model` is set while it can be used."""

    state: ModelState
    reason: str = ""
    model: Model | None = None


class ModelLifecycle:
    """The versions of all models. Loads and unloads of one name queue up, those of several run at once."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._slots: dict[str, dict[int, VersionSlot]] = {}
        self._busy: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._retiring: set[asyncio.Task[None]] = set()
        self._waits_for: dict[str, str] = {}  # while they load: a model to the one that it needs

    def find(self, name: str, version: str) -> Model:
        """The model that requests go to; version "" is the newest that is ready. Raises `ServerError`."""
        prefix = f"Request for unknown model: '{name}'"
        slots = self._slots.get(name)
        if slots is None:
            raise NotFound(f"{prefix} is not found")
        if version in ("", "-1"):
            for slot in reversed(slots.values()):
                if slot.model is not None:
                    return slot.model
            raise Unavailable(f"{prefix} has no available versions")
        if not version.isascii() or not version.isdigit() or len(version) > _MOST_DIGITS:
            raise InvalidArgument(
                f"failed to get model version from specified version string '{version}', "
                "version should be an integral value > 0"
            )
        found = slots.get(int(version))
        if found is None:
            raise NotFound(f"{prefix} version {version} is not found")
        if found.model is None:
            raise Unavailable(f"{prefix} version {version} is not at ready state")
        return found.model

    def models(self) -> Iterator[Model]:
        """All versions that are ready, by name and version."""
        for name in sorted(self._slots):
            for slot in self._slots[name].values():
                if slot.model is not None:
                    yield slot.model

    def entries(self, name: str) -> list[IndexEntry]:
        """The rows of the repository index for one model."""
        slots = self._slots.get(name)
        if not slots:
            return [IndexEntry(name)]
        return [
            IndexEntry(name, str(version) if version else "", slot.state, slot.reason)
            for version, slot in slots.items()
        ]

    @property
    def names(self) -> list[str]:
        """The models that were ever touched."""
        return list(self._slots)

    def all_ready(self) -> bool:
        """Whether every version that is meant to be loaded can serve."""
        return all(
            slot.model.ready() if slot.model is not None else slot.reason == UNLOADED
            for slots in self._slots.values()
            for slot in slots.values()
        )

    async def load(self, source: ModelSource) -> None:
        """Load the versions that the policy selects, or replace the ones that are loaded.

        Versions that are loaded already serve until the new ones are ready, and stay when those fail.
        Raises `ServerError` with the reason.
        """
        async with self._loading(source.name):
            await self._load(source)

    async def require(self, source: ModelSource) -> None:
        """Load a model unless it is loaded; waits for a load that is under way. Raises `ServerError`."""
        async with self._loading(source.name):
            if not any(slot.model is not None for slot in self._slots.get(source.name, {}).values()):
                await self._load(source)

    @asynccontextmanager
    async def _loading(self, name: str) -> AsyncIterator[None]:
        """The right to change a model. Raises `InvalidArgument` where a model would wait for itself."""
        parent = _being_loaded.get()
        if parent:
            self._wait(parent, name)
        token = _being_loaded.set(name)
        try:
            async with self._busy[name]:
                yield
        finally:
            _being_loaded.reset(token)
            self._waits_for.pop(parent, None)

    def _wait(self, parent: str, name: str) -> None:
        chain = [parent, name]
        while chain[-1] in self._waits_for and chain[-1] != parent:
            chain.append(self._waits_for[chain[-1]])
        if chain[-1] == parent:
            raise InvalidArgument(f"models depend on each other in a circle: {' -> '.join(chain)}")
        self._waits_for[parent] = name

    async def _load(self, source: ModelSource) -> None:
        old = self._slots.get(source.name, {})
        serving = any(slot.model is not None for slot in old.values())
        if not serving:
            newest = (find_versions(source.directory) or [0])[-1]
            self._slots[source.name] = {newest: VersionSlot(ModelState.LOADING)}
        try:
            fresh = await self._load_all(source, keep_old=serving)
        except asyncio.CancelledError:
            if not serving:
                self._slots.pop(source.name, None)
            raise
        self._swap(source, old, fresh)
        self._raise_failures(source.name, fresh)

    def fail(self, name: str, reason: str) -> None:
        """Note that a model cannot even be found."""
        self._slots[name] = {0: VersionSlot(ModelState.UNAVAILABLE, reason)}

    async def unload(self, name: str, timeout: float | None) -> None:
        """Stop serving all versions of a model, when the requests in flight have ended."""
        async with self._busy[name]:
            slots = self._slots.get(name, {})
            models = [slot.model for slot in slots.values() if slot.model is not None]
            for slot in slots.values():
                if slot.model is not None:
                    slot.state, slot.reason = ModelState.UNLOADING, ""
                    slot.model.retire()
                    slot.model = None
            await asyncio.gather(*(self._unload_model(model, timeout) for model in models))
            for slot in slots.values():
                slot.state, slot.reason = ModelState.UNAVAILABLE, UNLOADED

    async def unload_all(self, timeout: float | None) -> None:
        """Unload everything, models that were replaced included."""
        await asyncio.gather(*(self.unload(name, timeout) for name in self._slots), *self._retiring)

    async def _load_all(self, source: ModelSource, *, keep_old: bool) -> dict[int, VersionSlot]:
        try:
            plan = await asyncio.to_thread(plan_model, source, self._core.options)
        except Exception as raised:
            error = _server_error(raised, source.name)
            if not keep_old:
                for slot in self._slots[source.name].values():
                    slot.state, slot.reason = ModelState.UNAVAILABLE, error.message
            message = f"load failed for model '{source.name}': {error.message}"
            raise ServerError(message, error.code) from None
        slots = {version: VersionSlot(ModelState.LOADING) for version in plan.versions}
        if not keep_old:
            self._slots[source.name] = slots
        await asyncio.gather(*(self._load_version(plan, version, slot) for version, slot in slots.items()))
        if keep_old and any(slot.model is None for slot in slots.values()):
            for slot in slots.values():
                if slot.model is not None:
                    await self._unload_model(slot.model, 0)
                    slot.model = None
            self._raise_failures(source.name, slots)
        return slots

    async def _load_version(self, plan: ModelPlan, version: int, slot: VersionSlot) -> None:
        started = time.monotonic()
        try:
            model = await self._make(plan, version)
        except Exception as error:
            slot.state = ModelState.UNAVAILABLE
            slot.reason = _server_error(error, plan.source.name).message
        else:
            model.load_duration = time.monotonic() - started
            slot.state, slot.model = ModelState.READY, model
            logger.info("loaded version %d of model '%s' in %.2f s", version, model.name, model.load_duration)

    async def _make(self, plan: ModelPlan, version: int) -> Model:
        config = type(plan.config)()
        config.CopyFrom(plan.config)
        metrics = self._core.options.metrics
        statistics = ModelStatistics(
            plan.source.name,
            str(version),
            ModelLatencies.of(metrics),
            first_response_histogram(metrics, config),
        )
        context = ModelContext(
            core=self._core,
            name=plan.source.name,
            version=str(version),
            config=config,
            directory=plan.source.directory,
            version_directory=plan.versions[version],
            statistics=statistics,
            backend_config=self._core.options.backend_config.get(config.backend, {}),
        )
        backend = plan.backend(context)
        try:
            await backend.load()
            model = Model(context, backend)
            await warm_up(context, backend, model.signature)
            return model
        except BaseException:
            await backend.unload()
            raise

    def _swap(self, source: ModelSource, old: dict[int, VersionSlot], fresh: dict[int, VersionSlot]) -> None:
        """Let requests go to the fresh models from now on, and the old ones end in peace."""
        ready = [str(version) for version, slot in fresh.items() if slot.model is not None]
        for slot in fresh.values():
            if slot.model is not None:
                slot.model.versions = ready
                slot.model.source = source
        self._slots[source.name] = slots = dict(fresh)
        for version, slot in old.items():
            if slot.model is None:
                continue
            model, slot.model = slot.model, None
            successor = fresh[version].model if version in fresh else None
            model.retire(successor)
            if version not in slots:
                slots[version] = VersionSlot(ModelState.UNLOADING)
            self._start(self._retire(model, slots.get(version)))
        self._slots[source.name] = dict(sorted(slots.items()))

    async def _retire(self, model: Model, slot: VersionSlot | None) -> None:
        await self._unload_model(model, self._core.options.unload_timeout)
        if slot is not None and slot.state is ModelState.UNLOADING:
            slot.state, slot.reason = ModelState.UNAVAILABLE, UNLOADED

    async def _unload_model(self, model: Model, timeout: float | None) -> None:
        try:
            await model.unload(timeout)
        except Exception:
            logger.exception("backend of model '%s' failed to unload", model.name)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    @staticmethod
    def _raise_failures(name: str, slots: dict[int, VersionSlot]) -> None:
        failures = [
            f"version {version} is at {slot.state.value} state: {slot.reason};"
            for version, slot in slots.items()
            if slot.state is ModelState.UNAVAILABLE and slot.reason != UNLOADED
        ]
        if failures:
            raise InternalError(f"load failed for model '{name}': " + " ".join(failures))


def _server_error(error: Exception, name: str) -> ServerError:
    """What a backend raised, as an error with a message for the client; a surprise goes to the log as well."""
    if isinstance(error, ServerError):
        return error
    logger.error("failed to load model '%s'", name, exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")
