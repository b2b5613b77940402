"""Model lifecycle: load, reload, unload."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neso.server.backend import Backend, ModelContext
from neso.server.config.model_config import differ_in_instances_only, is_ensemble
from neso.server.errors import InternalError, ServerError, Unavailable, Unsupported
from neso.server.loading.loader import ModelPlan, backend_settings, plan_model, warm_up
from neso.server.loading.model_table import UNLOADED, LoadLocks, ModelRecord, ModelTable, VersionSlot
from neso.server.memory import release_memory
from neso.server.metadata import ModelState
from neso.server.metrics.latency import ModelLatencies, first_response_histogram
from neso.server.model import Model, unload_backend
from neso.server.options import ServerOptions
from neso.server.rate_limiter.limiter import LimitedInstances
from neso.server.repository.source import ModelSource, find_versions
from neso.server.statistics import ModelStatistics

if TYPE_CHECKING:
    from neso.server.core import Core

logger = logging.getLogger(__name__)


class ModelLifecycle:
    """Loads and unloads models of the table: one operation per name at a time, different names concurrently."""

    def __init__(self, core: Core, table: ModelTable) -> None:
        self._core = core
        self._table = table
        self._retiring: set[asyncio.Task[None]] = set()
        self._locks = LoadLocks(core.options.model_load_thread_count)
        self._clock = itertools.count(1)
        self._ending = False

    def all_ready(self) -> bool:
        """Return whether all versions that should be loaded are ready."""
        return all(
            slot.model.ready() if slot.model is not None else slot.unloaded
            for record in self._table
            for slot in record.slots.values()
        )

    async def load(self, source: ModelSource, *, explicit: bool = False) -> None:
        """Load the versions selected by the version policy, or reload the changed ones.

        No effect if the loaded versions already match the source. The configuration of an earlier load request is kept
        unless `source` has another one or the files of the configuration have changed. Loaded versions serve requests
        until the new versions are ready, and stay loaded if these fail. Raises `ServerError` with the reason.
        """
        async with self._locks.loading(source.id):
            record = self._table.record(source)
            record.explicit |= explicit
            source = source.with_kept_config(record.source)
            if not record.holds(source):
                await self._load(record, source)

    async def require(self, source: ModelSource) -> None:
        """Load a model unless it is loaded; waits for a load in progress. Raises `ServerError`."""
        async with self._locks.loading(source.id):
            record = self._table.record(source)
            if not record.models:
                await self._load(record, source)

    async def refresh_ensembles(self) -> None:
        """Reload ensembles whose steps have changed, and unload ensembles that can no longer run.

        Called after loads and unloads. No effect if the current task is loading another model; that load calls it at
        its end.
        """
        if self._locks.in_load:
            return
        while stale := self._table.stale_ensembles():
            await asyncio.gather(*(self._refresh(record) for record in stale))

    async def _refresh(self, record: ModelRecord) -> None:
        async with self._locks.loading(record.id):
            if record not in self._table.stale_ensembles():
                return
            source, record.checked = record.requested, next(self._clock)
            assert source is not None
            missing = [step for step in sorted(record.steps) if not self._serves(step)]
            if missing:
                reason = f"ensemble '{record.name}' depends on '{missing[0]}' which has no loaded version."
            else:
                try:
                    await self._load(record, source)
                    return
                except ServerError as error:
                    reason = error.message
            logger.error("unloading ensemble '%s': %s", record.name, reason)
            await self._unload(record, self._core.options.unload_timeout, reason)

    def _serves(self, name: str) -> bool:
        return any(record.models for record in self._table.named(name))

    async def _load(self, record: ModelRecord, source: ModelSource) -> None:
        old, before = record.slots, record.requested
        serving = bool(record.models)
        record.requested = source
        if not serving:
            newest = (find_versions(source.directory) or [0])[-1]
            record.slots = {newest: VersionSlot(ModelState.LOADING)}
        try:
            fresh = await self._load_all(record, source, keep_old=serving)
        except asyncio.CancelledError:
            record.requested = before
            if not serving:
                record.slots = {}
            raise
        except ServerError:
            if not serving:  # a changed step can require unloading a serving ensemble
                record.checked = next(self._clock)
            raise
        # After the load: it may have loaded the ensemble's steps.
        record.checked = next(self._clock)
        self._swap(record, source, old, fresh)
        self._raise_failures(record.name, fresh)

    def fail(self, name: str, reason: str) -> bool:
        """Record that a model cannot be found. Returns False if this was already recorded."""
        record = self._table.record(ModelSource(name, Path()))
        known = any(slot.reason == reason for slot in record.slots.values())
        record.slots = {0: VersionSlot(ModelState.UNAVAILABLE, reason)}
        return not known

    async def unload(self, id: str, timeout: float | None) -> None:
        """Unload all versions of a model once their requests in flight have ended; see `Model.unload`.

        Raises `Unavailable` if the model is still being loaded after `timeout` seconds.
        """
        lock = self._locks.lock(id)
        try:
            await asyncio.wait_for(lock.acquire(), timeout)
        except asyncio.TimeoutError:
            raise Unavailable(f"model '{id}' cannot be unloaded: it is still being loaded") from None
        try:
            record = self._table.get(id)
            if record is None:
                return
            record.explicit, record.requested = False, None
            if await self._unload(record, timeout, UNLOADED) and not self._ending:
                await asyncio.to_thread(release_memory)
        finally:
            lock.release()

    async def forget(self, id: str) -> None:
        """Remove a model from the table after it was unloaded."""
        async with self._locks.lock(id):
            record = self._table.get(id)
            if record is not None and record.unloaded:
                self._table.drop(id)

    async def _unload(self, record: ModelRecord, timeout: float | None, reason: str) -> bool:
        """Unload all versions. Returns False if no version was loaded."""
        slots = tuple(record.slots.values())
        models = [model for slot in slots if (model := slot.retire()) is not None]
        record.source = None
        if models:
            record.changed = next(self._clock)
        await asyncio.gather(*(self._unload_model(model, timeout) for model in models))
        for slot in slots:
            slot.close(reason)
        return bool(models)

    async def unload_all(self, timeout: float | None) -> None:
        """Unload all models, including replaced ones, when the server stops."""
        self._ending = True
        unloads = (self.unload(record.id, timeout) for record in self._table)
        results = await asyncio.gather(*unloads, self._end_retiring(timeout), return_exceptions=True)
        for result in results:
            if isinstance(result, ServerError):
                logger.error(result.message)
            elif isinstance(result, BaseException):
                raise result

    async def _end_retiring(self, timeout: float | None) -> None:
        """Wait for the replaced models; unload them at once after `timeout` seconds."""
        if not self._retiring:
            return
        _, pending = await asyncio.wait(self._retiring, timeout=timeout)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _load_all(
        self, record: ModelRecord, source: ModelSource, *, keep_old: bool
    ) -> dict[int, VersionSlot]:
        try:
            plan = await asyncio.to_thread(_plan, source, self._core.options)
        except Exception as raised:
            error = _server_error(raised, source.name)
            if not keep_old:
                for slot in record.slots.values():
                    slot.state, slot.reason = ModelState.UNAVAILABLE, error.message
            message = f"load failed for model '{source.name}': {error.message}"
            raise ServerError(message, error.code) from None
        record.steps = plan.steps
        slots = {version: VersionSlot(ModelState.LOADING, config=plan.config) for version in plan.versions}
        if not keep_old:
            record.slots = slots
        await asyncio.gather(*(self._load_version(record, plan, version, slots) for version in plan.versions))
        if keep_old and any(slot.model is None for slot in slots.values()):
            for version, slot in slots.items():
                if slot.model is not None and slot is not record.slots.get(version):
                    await self._unload_model(slot.model, 0)
                    slot.model = None
            self._raise_failures(record.name, slots)
        return slots

    async def _load_version(
        self, record: ModelRecord, plan: ModelPlan, version: int, slots: dict[int, VersionSlot]
    ) -> None:
        """Load a version, or keep the serving one if it matches the plan."""
        started, slot = time.monotonic(), slots[version]
        serving = self._reusable(record, plan, version)
        try:
            if serving is not None and await serving.update_instances(plan.config):
                slots[version] = slot = record.slots[version]
                slot.config = plan.config
                return
            async with self._locks.slot(record.id):
                model = await self._try_to_make(plan, version)
        except Exception as error:
            slot.state = ModelState.UNAVAILABLE
            slot.reason = _server_error(error, record.name).message
        else:
            model.load_duration = time.monotonic() - started
            model.source = plan.source, plan.agents
            slot.state, slot.model = ModelState.READY, model
            logger.info("loaded version %d of model '%s' in %.2f s", version, model.name, model.load_duration)

    @staticmethod
    def _reusable(record: ModelRecord, plan: ModelPlan, version: int) -> Model | None:
        """Return the serving model if only the instance groups of its configuration may have changed, else None."""
        slot, source = record.slots.get(version), record.source
        if slot is None or slot.model is None or source is None or is_ensemble(plan.config):
            return None
        before, now = source.fingerprint, plan.source.fingerprint
        same = before is not None and now is not None and before.same_version(now, version)
        if same and slot.model.ready() and differ_in_instances_only(slot.config, plan.config):
            return slot.model
        return None

    async def _try_to_make(self, plan: ModelPlan, version: int) -> Model:
        for attempt in itertools.count(1):
            try:
                return await self._make(plan, version)
            except Exception as error:
                if attempt > self._core.options.model_load_retry_count:
                    raise
                logger.warning("model '%s' failed to load, trying again: %s", plan.source.name, error)
        raise AssertionError  # unreachable

    async def _make(self, plan: ModelPlan, version: int) -> Model:
        limited = self._register(plan)
        try:
            return await self._make_limited(plan, version, limited)
        except BaseException:
            if limited is not None:
                limited.close()
            raise

    def _register(self, plan: ModelPlan) -> LimitedInstances | None:
        """Register the instances with the rate limiter. Raises `InvalidArgument` for unsatisfiable resources."""
        limiter = self._core.rate_limiter
        if limiter is None:
            return None
        if not plan.backend.batches:
            if any(group.rate_limiter.resources for group in plan.config.instance_group):
                logger.warning(
                    "model '%s': its backend schedules its requests by itself, rate_limiter has no effect",
                    plan.source.name,
                )
            return None
        return limiter.register(plan.config)

    async def _make_limited(self, plan: ModelPlan, version: int, limited: LimitedInstances | None) -> Model:
        config = type(plan.config)()
        config.CopyFrom(plan.config)
        metrics = self._core.options.metrics
        statistics = ModelStatistics(
            plan.source.name,
            str(version),
            ModelLatencies.from_config(metrics),
            first_response_histogram(metrics, config),
        )
        context = ModelContext(
            core=self._core,
            name=plan.source.name,
            version=str(version),
            config=config,
            directory=plan.directory,
            version_directory=plan.versions[version],
            statistics=statistics,
            backend_config=backend_settings(config.backend, self._core.options),
            namespace=plan.source.namespace,
            limited=limited,
        )
        backend = plan.backend(context)
        try:
            await backend.load()
            if self._core.front_ends is not None:
                _check_shared(backend)
            model = Model(context, backend)
            await warm_up(context, backend, model.signature)
            return model
        except asyncio.CancelledError:  # the server stops
            await unload_backend(backend, 0)
            raise
        except BaseException:
            await backend.unload()
            raise

    def _swap(
        self,
        record: ModelRecord,
        source: ModelSource,
        old: dict[int, VersionSlot],
        fresh: dict[int, VersionSlot],
    ) -> None:
        """Route requests to the new models, and unload the old models when they are idle."""
        ready = [str(version) for version, slot in fresh.items() if slot.model is not None]
        for slot in fresh.values():
            if slot.model is not None:
                slot.model.versions = ready
        slots = dict(fresh)
        for version, slot in old.items():
            if slot.model is None or slot is fresh.get(version):
                continue
            model, slot.model = slot.model, None
            model.retire(fresh[version].model if version in fresh else None)
            if version not in slots:
                slots[version] = VersionSlot(ModelState.UNLOADING, unloaded=True)
            self._start(self._retire(model, slots.get(version)))
        if any(slot is not old.get(version) for version, slot in slots.items()):
            record.changed = next(self._clock)
        record.source = source if len(ready) == len(fresh) else None
        record.slots = dict(sorted(slots.items()))

    async def _retire(self, model: Model, slot: VersionSlot | None) -> None:
        try:
            await self._unload_model(model, self._core.options.replace_timeout)
        except asyncio.CancelledError:  # the server stops
            await self._unload_model(model, 0)
            raise
        del model
        if slot is not None and slot.state is ModelState.UNLOADING:
            slot.close()
        if not self._ending:
            await asyncio.to_thread(release_memory)

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
            if slot.state is ModelState.UNAVAILABLE and not slot.unloaded
        ]
        if failures:
            raise InternalError(f"load failed for model '{name}': " + " ".join(failures))


def _check_shared(backend: Backend) -> None:
    """Raise `Unsupported` for a model that generates text in this process, if there are front-end processes."""
    generates = backend.language_model is not None or backend.pooling_model is not None
    if generates and backend.share() is None:
        raise Unsupported(
            f"backend '{backend.context.config.backend}' is not supported with --server-processes greater than 1"
        )


def _plan(source: ModelSource, options: ServerOptions) -> ModelPlan:
    return plan_model(source.localized(), options)


def _server_error(error: Exception, name: str) -> ServerError:
    """Convert an exception of a backend to a `ServerError`; unexpected exceptions are logged."""
    if isinstance(error, ServerError):
        return error
    logger.error("failed to load model '%s'", name, exc_info=error)
    return InternalError(f"{type(error).__name__}: {error}")
