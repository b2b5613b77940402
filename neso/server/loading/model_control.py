"""Model control modes: loading at start, on request, or by polling the repositories."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from neso.server.config.model_config import read_config
from neso.server.errors import InternalError, NotFound, ServerError, Unavailable, Unsupported
from neso.server.loading.lifecycle import ModelLifecycle
from neso.server.loading.model_table import ModelTable
from neso.server.metadata import IndexEntry
from neso.server.options import ModelControlMode, ServerOptions
from neso.server.repository.names import check_model_name
from neso.server.repository.repositories import IN_SEVERAL, ModelRepositories
from neso.server.repository.source import Fingerprint, ModelSource, source_of_files

logger = logging.getLogger(__name__)

STOPPING = "Server is stopping, no model is loaded any more"


class ModelControl:
    """Loads and unloads models according to the model control mode. Runs on the core's loop."""

    def __init__(self, options: ServerOptions, table: ModelTable, lifecycle: ModelLifecycle) -> None:
        self._options = options
        self._table = table
        self._lifecycle = lifecycle
        self._repositories = ModelRepositories(
            options.model_repository, namespacing=options.model_namespacing
        )
        self._added: dict[str, ModelSource] = {}
        self._loads: set[asyncio.Task[None]] = set()
        self._steps_in_load: dict[asyncio.Event, set[str]] = {}
        """Steps of the ensembles of each load in progress, by the event that is set at its end."""
        self._looking = asyncio.Lock()
        self._polling: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Load the startup models and start polling. Raises `NotFound` for a missing repository."""
        await asyncio.to_thread(self._repositories.check)
        explicit = self._options.model_control_mode is ModelControlMode.EXPLICIT
        if explicit and self._options.startup_models != ("*",):
            await self._load_named(self._options.startup_models)
        else:
            await self._follow_repositories()
        if self._options.model_control_mode is ModelControlMode.POLL and self._options.repository_poll_secs:
            self._polling = asyncio.get_running_loop().create_task(self._poll_forever())

    async def stop(self) -> None:
        """Cancel loads in progress and reject new loads."""
        self._stopping = True
        tasks = {*self._loads, *((self._polling,) if self._polling is not None else ())}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def add(self, name: str, config: Any, directory: Path) -> None:
        """Add a model that is not in a repository. It is loaded at start or on request. Raises `InvalidArgument`."""
        check_model_name(name)
        self._added[name] = ModelSource(name, Path(directory), fingerprint=Fingerprint(), config=config)

    def index(self) -> list[IndexEntry]:
        """Return the models in the repositories and models loaded from elsewhere, with their states."""
        entries = [(record.name, record.entries()) for record in self._table]
        known = {name for name, _ in entries}
        untouched = {*self._repositories.names(), *self._added} - known
        entries += [(name, [IndexEntry(name)]) for name in untouched]
        return [entry for _, rows in sorted(entries, key=lambda named: named[0]) for entry in rows]

    async def load(self, name: str, config: str | None = None, files: dict[str, bytes] | None = None) -> None:
        """Load a model on request, including the steps of an ensemble. Raises `ServerError`."""
        self._check_control()
        check_model_name(name)
        sources = await asyncio.to_thread(self._requested, name, config, files)
        await self._in_task(self._load(sources), name)

    async def require(self, name: str, namespace: str) -> None:
        """Load a dependency of another model, unless it is already loaded. Raises `ServerError`."""
        source = await asyncio.to_thread(self._find_one, name, namespace)
        await self._lifecycle.require(source)

    async def unload(self, name: str, unload_dependents: bool) -> None:
        """Unload a model on request, and the ensembles that use it. No effect if it is not loaded.

        With `unload_dependents`, also unload an ensemble's step models that were not loaded by name and are not needed
        by another model.
        """
        self._check_control()
        await asyncio.shield(asyncio.ensure_future(self._unload(name, unload_dependents)))

    async def poll(self) -> None:
        """Poll the repositories now. Raises `Unavailable` unless in mode POLL."""
        if self._options.model_control_mode is not ModelControlMode.POLL:
            raise Unavailable("polling is disabled")
        await self._follow_repositories()

    async def register(self, uri: str | Path, mapping: dict[str, str] | None) -> None:
        """Add a repository. Raises `Unsupported` unless in mode EXPLICIT, `AlreadyExists`, `InvalidArgument`."""
        self._check_registration("registration")
        await asyncio.to_thread(self._repositories.register, uri, mapping)

    async def unregister(self, uri: str | Path) -> None:
        """Remove a repository. Raises `Unsupported` unless in mode EXPLICIT, `InvalidArgument`."""
        self._check_registration("unregistration")
        self._repositories.unregister(uri)

    # -- loading on request -------------------------------------------------------------------------------------

    def _requested(self, name: str, config: str | None, files: dict[str, bytes] | None) -> list[ModelSource]:
        failed = f"failed to load '{name}', failed to poll from model repository"
        try:
            if files:
                return [source_of_files(name, config, files)]
            sources = self._find(name)
            return sources if config is None else [source.with_config(config) for source in sources]
        except NotFound:
            raise InternalError(f"{failed}: model not found") from None
        except ServerError as error:
            raise ServerError(f"{failed}: {error.message}", error.code) from None

    def _find(self, name: str) -> list[ModelSource]:
        return [self._added[name]] if name in self._added else self._repositories.find(name)

    def _find_one(self, name: str, namespace: str) -> ModelSource:
        return self._added.get(name) or self._repositories.find_one(name, namespace)

    def _steps(self, sources: list[ModelSource]) -> list[ModelSource]:
        """Return the steps of ensembles, recursively: they may have changed too. Unreadable steps are omitted."""
        found: dict[str, ModelSource] = {source.id: source for source in sources}
        pending = list(sources)
        while pending:
            source = pending.pop()
            try:
                config = source.config or read_config(source.directory, self._options.model_config_name)
                names = {step.model_name for step in config.ensemble_scheduling.step} if config else set()
                steps = [self._find_one(name, source.namespace) for name in sorted(names)]
            except ServerError:
                continue  # reported when the step is loaded
            fresh = [step for step in steps if step.id not in found]
            found.update((step.id, step) for step in fresh)
            pending += fresh
        return list(found.values())[len(sources) :]

    async def _load(self, sources: list[ModelSource]) -> None:
        steps = await asyncio.to_thread(self._steps, sources)
        ended = asyncio.Event()
        self._steps_in_load[ended] = {step.name for step in steps}
        try:
            # The load of the ensemble reports why a step failed.
            await self._all(self._lifecycle.load(step) for step in steps if not self._is_overridden(step))
            results = await self._all(self._lifecycle.load(source, explicit=True) for source in sources)
        finally:
            del self._steps_in_load[ended]
            ended.set()
        await self._lifecycle.refresh_ensembles()
        for error in results:
            if error is not None:
                raise error

    def _is_overridden(self, source: ModelSource) -> bool:
        record = self._table.get(source.id)
        return record is not None and record.source is not None and record.source.overridden

    async def _loads_with_step(self, name: str) -> None:
        """Wait for the loads of ensembles with this step: they would load it again. Raises `Unavailable`."""
        waits = [ended.wait() for ended, steps in self._steps_in_load.items() if name in steps]
        try:
            await asyncio.wait_for(asyncio.gather(*waits), self._options.unload_timeout)
        except asyncio.TimeoutError:
            raise Unavailable(
                f"model '{name}' cannot be unloaded: an ensemble is still being loaded"
            ) from None

    async def _unload(self, name: str, unload_dependents: bool) -> None:
        await self._loads_with_step(name)
        records = self._table.named(name)
        steps = {step for record in records for step in record.steps}
        await asyncio.gather(*(self._lifecycle.unload(r.id, self._options.unload_timeout) for r in records))
        await self._lifecycle.refresh_ensembles()
        for step in sorted(steps) if unload_dependents else ():
            records = self._table.named(step)
            needed = any(step in record.steps and record.models for record in self._table)
            if not needed and not any(record.explicit for record in records):
                await self._unload(step, unload_dependents=True)

    def _check_control(self) -> None:
        if self._stopping:
            raise Unavailable(STOPPING)
        if self._options.model_control_mode is not ModelControlMode.EXPLICIT:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")

    def _check_registration(self, what: str) -> None:
        if self._options.model_control_mode is not ModelControlMode.EXPLICIT:
            raise Unsupported(f"repository {what} is not allowed if model control mode is not EXPLICIT")

    # -- loading at start and by polling ------------------------------------------------------------------------

    async def _load_named(self, names: Iterable[str]) -> None:
        sources: list[ModelSource] = list(self._added.values())
        for name in sorted(set(names) - self._added.keys()):
            try:
                sources += await asyncio.to_thread(self._find, name)
            except ServerError as error:
                self._fail(name, error.message)
        await self._load_or_log(sources)

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._options.repository_poll_secs)
            try:
                await self._follow_repositories()
            except Exception:
                logger.exception("failed to poll the model repositories")

    async def _follow_repositories(self) -> None:
        """Load new, changed and previously failed models; unload removed ones."""
        async with self._looking:
            try:
                scan = await asyncio.to_thread(self._repositories.scan)
            except OSError as error:
                logger.error("failed to poll the model repositories, nothing is changed: %s", error)
                return
            there = {**scan.sources, **self._added}
            gone = [
                record.id
                for record in self._table
                if record.id not in there and (record.models or record.name not in scan.ambiguous)
            ]
            await self._all(self._lifecycle.unload(id, self._options.unload_timeout) for id in gone)
            for name in scan.ambiguous - self._added.keys():
                self._fail(name, IN_SEVERAL)
            await self._load_or_log(there.values())
            for id in gone:
                await self._lifecycle.forget(id)

    def _fail(self, name: str, reason: str) -> None:
        if self._lifecycle.fail(name, reason):
            logger.error("failed to load model '%s': %s", name, reason)

    async def _load_or_log(self, sources: Iterable[ModelSource]) -> None:
        sources = sorted(sources, key=lambda source: source.id)
        results = await self._all(
            self._in_task(self._lifecycle.load(source, explicit=True), source.name) for source in sources
        )
        for source, error in zip(sources, results, strict=True):
            if error is not None:
                reason = error.message.removeprefix(f"load failed for model '{source.name}': ")
                logger.error("failed to load model '%s': %s", source.name, reason)
        await self._lifecycle.refresh_ensembles()

    # -- tasks --------------------------------------------------------------------------------------------------

    @staticmethod
    async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> list[ServerError | None]:
        """Wait for all coroutines. Returns their `ServerError`s; raises other exceptions."""

        async def attempt(one: Coroutine[Any, Any, None]) -> ServerError | None:
            try:
                await one
            except ServerError as error:
                return error
            return None

        return await asyncio.gather(*(attempt(one) for one in work))

    async def _in_task(self, load: Coroutine[Any, Any, None], name: str) -> None:
        """Load in a separate task, which is cancelled when the server stops, but not when the client cancels."""
        if self._stopping:
            load.close()
            raise Unavailable(STOPPING)
        task = asyncio.get_running_loop().create_task(load)
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Unavailable(f"failed to load '{name}', the server is stopping") from None
