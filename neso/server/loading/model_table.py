"""Table of the known models and the states of their versions, and locks that serialize loads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from neso.server.errors import InvalidArgument, NotFound, Unavailable
from neso.server.metadata import IndexEntry, ModelState
from neso.server.model import Model
from neso.server.repository.source import ModelSource

# Model that the current task is loading. Its load waits for the loads that it starts.
_being_loaded: ContextVar[str] = ContextVar("model that is being loaded", default="")


class LoadLocks:
    """Per-model locks and a limit on concurrent loads. The load of a model can wait for loads of other models."""

    def __init__(self, num_slots: int) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # kept while in use
        self._waits_for: dict[str, str] = {}  # for each model being loaded: the model whose load it waits for
        self._slots = asyncio.Semaphore(num_slots)
        self._held_slots: Counter[str] = Counter()

    @property
    def in_load(self) -> bool:
        """Whether the current task loads a model."""
        return bool(_being_loaded.get())

    def lock(self, id: str) -> asyncio.Lock:
        """Return the lock to hold while changing a model."""
        lock = self._locks.get(id)
        if lock is None:
            lock = self._locks[id] = asyncio.Lock()
        return lock

    @asynccontextmanager
    async def loading(self, id: str) -> AsyncIterator[None]:
        """Acquire the lock of a model for a load. Raises `InvalidArgument` for a cycle of dependencies."""
        parent = _being_loaded.get()
        if parent:
            self._wait(parent, id)
            self._release_slots(parent)
        token = _being_loaded.set(id)
        try:
            async with self.lock(id):
                yield
        finally:
            _being_loaded.reset(token)
            self._waits_for.pop(parent, None)

    @asynccontextmanager
    async def slot(self, id: str) -> AsyncIterator[None]:
        """Hold a slot of the limit on concurrent loads."""
        await self._slots.acquire()
        self._held_slots[id] += 1
        try:
            yield
        finally:
            if self._held_slots[id]:
                self._held_slots[id] -= 1
                self._slots.release()
            if not self._held_slots[id]:
                del self._held_slots[id]

    def _release_slots(self, id: str) -> None:
        """Release the slots of a model while it waits for the loads of other models."""
        for _ in range(self._held_slots.pop(id, 0)):
            self._slots.release()

    def _wait(self, parent: str, id: str) -> None:
        chain = [parent, id]
        while chain[-1] in self._waits_for and chain[-1] != parent:
            chain.append(self._waits_for[chain[-1]])
        if chain[-1] == parent:
            raise InvalidArgument(f"models depend on each other in a cycle: {' -> '.join(chain)}")
        self._waits_for[parent] = id


UNLOADED = "unloaded"
_MAX_DIGITS = 20  # maximum length of a version; Python limits the number of digits of integers that it parses


@dataclass(slots=True, eq=False)
class VersionSlot:
    """One version of a model in the table. `model` is set while the version can be used.

    `config`: configuration used for the load. `unloaded`: unloaded on purpose or with a step of the ensemble, as
    opposed to a failed load.
    """

    state: ModelState
    reason: str = ""
    model: Model | None = None
    config: Any = None
    unloaded: bool = False

    def retire(self) -> Model | None:
        """Stop routing requests to the model before it is unloaded."""
        model, self.model = self.model, None
        if model is not None:
            self.state, self.reason = ModelState.UNLOADING, ""
            model.retire()
        return model

    def close(self, reason: str = UNLOADED) -> None:
        """Record that the version was unloaded."""
        self.state, self.reason, self.unloaded = ModelState.UNAVAILABLE, reason, True


@dataclass(slots=True, eq=False)
class ModelRecord:
    """A model in the table.

    - source: source of the serving versions
    - requested: last requested source; None if the model should be unloaded
    - steps: model names of an ensemble's steps
    - explicit: loaded by name, not only as a step of an ensemble
    - changed: logical time when the set of serving versions changed
    - checked: logical time of the last attempt to load
    """

    id: str
    name: str
    slots: dict[int, VersionSlot] = field(default_factory=dict)
    source: ModelSource | None = None
    requested: ModelSource | None = None
    steps: frozenset[str] = frozenset()
    explicit: bool = False
    changed: int = 0
    checked: int = 0

    @property
    def models(self) -> list[Model]:
        """The serving versions."""
        return [slot.model for slot in self.slots.values() if slot.model is not None]

    @property
    def unloaded(self) -> bool:
        return all(slot.unloaded for slot in self.slots.values())

    def holds(self, source: ModelSource) -> bool:
        """Return whether the serving versions are the versions that a load of `source` would produce."""
        if self.source is None or not self.models:
            return False
        if (self.source.overridden or source.overridden) and source.config is not self.source.config:
            return False
        if not all(slot.unloaded or (slot.model and slot.model.ready()) for slot in self.slots.values()):
            return False
        return source.fingerprint is not None and source.fingerprint == self.source.fingerprint

    def entries(self) -> list[IndexEntry]:
        """Return entries of the repository index."""
        return [
            IndexEntry(self.name, str(version) if version else "", slot.state, slot.reason)
            for version, slot in self.slots.items()
        ] or [IndexEntry(self.name)]


class ModelTable:
    """Records by id. An id is a model name, or with namespacing a model name and its repository."""

    def __init__(self) -> None:
        self._records: dict[str, ModelRecord] = {}
        self._namespaces: dict[str, set[str]] = {}  # ids by name; empty without namespacing

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(tuple(self._records.values()))

    def replace(self, records: Iterable[ModelRecord]) -> None:
        """Replace all records."""
        self._records = {record.id: record for record in records}
        self._namespaces = {}
        for record in self._records.values():
            if record.id != record.name:
                self._namespaces.setdefault(record.name, set()).add(record.id)

    def get(self, id: str) -> ModelRecord | None:
        return self._records.get(id)

    def record(self, source: ModelSource) -> ModelRecord:
        """Return the record of a model; create it if it does not exist."""
        record = self._records.get(source.id)
        if record is None:
            record = self._records[source.id] = ModelRecord(source.id, source.name)
            if source.namespace:
                self._namespaces.setdefault(source.name, set()).add(source.id)
        return record

    def named(self, name: str) -> list[ModelRecord]:
        """Return all records of a model name."""
        return [self._records[id] for id in (name, *self._namespaces.get(name, ())) if id in self._records]

    def drop(self, id: str) -> None:
        """Remove a model."""
        record = self._records.pop(id, None)
        if record is not None and (ids := self._namespaces.get(record.name)):
            ids.discard(id)
            if not ids:
                del self._namespaces[record.name]

    def find(self, name: str, version: str, namespace: str = "") -> Model:
        """Return the serving model; version "" selects the newest ready version. Raises `ServerError`.

        `namespace` selects one of several models with the same name.
        """
        record = self._records.get(name)
        if record is None or namespace:
            record = self._resolve(name, namespace)
        if version in ("", "-1"):
            for slot in reversed(record.slots.values()):
                if slot.model is not None:
                    return slot.model
            raise Unavailable(f"{_unknown(name)} has no available versions")
        if not version.isascii() or not version.isdigit() or len(version) > _MAX_DIGITS:
            raise InvalidArgument(
                f"failed to get model version from specified version string '{version}', "
                "version should be an integral value > 0"
            )
        found = record.slots.get(int(version))
        if found is None:
            raise NotFound(f"{_unknown(name)} version {version} is not found")
        if found.model is None:
            raise Unavailable(f"{_unknown(name)} version {version} is not at ready state")
        return found.model

    def _resolve(self, name: str, namespace: str) -> ModelRecord:
        in_namespace = self._records.get(f"{namespace}::{name}") if namespace else None
        if in_namespace is not None and not in_namespace.unloaded:
            return in_namespace
        found = self.named(name)
        if len(found) > 1:  # unloaded models do not make a name ambiguous
            found = [record for record in found if not record.unloaded] or found
        if not found:
            raise NotFound(f"{_unknown(name)} is not found")
        if len(found) > 1:
            raise InvalidArgument(
                f"There are {len(found)} identifiers of model '{name}' in global map, model namespace must be "
                "provided to resolve ambiguity."
            )
        return found[0]

    def stale_ensembles(self) -> list[ModelRecord]:
        """Return the ensembles with a step that has changed since the last load attempt of the ensemble."""
        return [
            record
            for record in self
            if record.requested is not None
            and any(
                step.changed > record.checked
                for name in record.steps
                for step in self.named(name)
                if step is not record
            )
        ]


def _unknown(name: str) -> str:
    return f"Request for unknown model: '{name}'"
