"""The known models by name with the state of their versions, and the locks that order loads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from neso.server.errors import InvalidArgument, NotFound, Unavailable
from neso.server.metadata import IndexEntry, ModelState
from neso.server.model import Model
from neso.server.repository.source import ModelSource

# The model that this task is loading: what it loads besides, that one waits for.
_being_loaded: ContextVar[str] = ContextVar("model that is being loaded", default="")


class LoadOrder:
    """Locks and places. A model that has others loaded while it loads itself waits for them."""

    def __init__(self, num_places: int) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = (
            WeakValueDictionary()
        )  # while someone wants them
        self._waits_for: dict[str, str] = {}  # while they load: a model to the one that it needs
        self._places = asyncio.Semaphore(num_places)
        self._placed: Counter[str] = Counter()

    @property
    def inside_a_load(self) -> bool:
        """Whether this is done for a model that is being loaded."""
        return bool(_being_loaded.get())

    def lock(self, id: str) -> asyncio.Lock:
        """To be held by whoever changes the model."""
        lock = self._locks.get(id)
        if lock is None:
            lock = self._locks[id] = asyncio.Lock()
        return lock

    @asynccontextmanager
    async def loading(self, id: str) -> AsyncIterator[None]:
        """The right to load a model. Raises `InvalidArgument` where a model would wait for itself."""
        parent = _being_loaded.get()
        if parent:
            self._wait(parent, id)
            self._give_up_places(parent)
        token = _being_loaded.set(id)
        try:
            async with self.lock(id):
                yield
        finally:
            _being_loaded.reset(token)
            self._waits_for.pop(parent, None)

    @asynccontextmanager
    async def place(self, id: str) -> AsyncIterator[None]:
        """One of the places for models that load at the same time."""
        await self._places.acquire()
        self._placed[id] += 1
        try:
            yield
        finally:
            if self._placed[id]:
                self._placed[id] -= 1
                self._places.release()
            if not self._placed[id]:
                del self._placed[id]

    def _give_up_places(self, id: str) -> None:
        """A model that waits for others must not stand in their way."""
        for _ in range(self._placed.pop(id, 0)):
            self._places.release()

    def _wait(self, parent: str, id: str) -> None:
        chain = [parent, id]
        while chain[-1] in self._waits_for and chain[-1] != parent:
            chain.append(self._waits_for[chain[-1]])
        if chain[-1] == parent:
            raise InvalidArgument(f"models depend on each other in a circle: {' -> '.join(chain)}")
        self._waits_for[parent] = id


UNLOADED = "unloaded"
_MOST_DIGITS = 20  # of a version; Python refuses to read numbers of some thousands


@dataclass(slots=True, eq=False)
class VersionSlot:
    """What is known of one version of a model that was touched. `model` is set while it can be used.

    `config` is what it was made of. `unloaded`: it is not there because nobody wants it, or because a step of the
    ensemble is not.
    """

    state: ModelState
    reason: str = ""
    model: Model | None = None
    config: Any = None
    unloaded: bool = False

    def retire(self) -> Model | None:
        """Let no more requests go to the model, which is to be unloaded now."""
        model, self.model = self.model, None
        if model is not None:
            self.state, self.reason = ModelState.UNLOADING, ""
            model.retire()
        return model

    def close(self, reason: str = UNLOADED) -> None:
        """It has been unloaded."""
        self.state, self.reason, self.unloaded = ModelState.UNAVAILABLE, reason, True


@dataclass(slots=True, eq=False)
class ModelRecord:
    """A model that was touched.

    `source`: what serves was loaded from it; `wanted`: the last that was to be loaded, None when it is to be gone.
    `steps`: the models that an ensemble is made of. `explicit`: asked for by name, not only because an ensemble needs
    it. `changed` and `checked` order events: when other versions than before began to serve or to be gone; when a load
    was tried the last time.
    """

    id: str
    name: str
    slots: dict[int, VersionSlot] = field(default_factory=dict)
    source: ModelSource | None = None
    wanted: ModelSource | None = None
    steps: frozenset[str] = frozenset()
    explicit: bool = False
    changed: int = 0
    checked: int = 0

    @property
    def models(self) -> list[Model]:
        """The versions that serve."""
        return [slot.model for slot in self.slots.values() if slot.model is not None]

    @property
    def unloaded(self) -> bool:
        return all(slot.unloaded for slot in self.slots.values())

    def holds(self, source: ModelSource) -> bool:
        """Whether what serves is what a load of the source would bring."""
        if self.source is None or not self.models or self.source.overridden or source.overridden:
            return False
        if not all(slot.unloaded or (slot.model and slot.model.ready()) for slot in self.slots.values()):
            return False
        return source.fingerprint is not None and source.fingerprint == self.source.fingerprint

    def entries(self) -> list[IndexEntry]:
        """The rows of the repository index."""
        return [
            IndexEntry(self.name, str(version) if version else "", slot.state, slot.reason)
            for version, slot in self.slots.items()
        ] or [IndexEntry(self.name)]


class ModelTable:
    """The records by id, which is the name unless models of several repositories may share it."""

    def __init__(self) -> None:
        self._records: dict[str, ModelRecord] = {}
        self._namespaces: dict[str, set[str]] = {}  # of each name; empty without namespacing

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(tuple(self._records.values()))

    def get(self, id: str) -> ModelRecord | None:
        return self._records.get(id)

    def record(self, source: ModelSource) -> ModelRecord:
        """The record of a model, a new one for a model that was never touched."""
        record = self._records.get(source.id)
        if record is None:
            record = self._records[source.id] = ModelRecord(source.id, source.name)
            if source.namespace:
                self._namespaces.setdefault(source.name, set()).add(source.id)
        return record

    def named(self, name: str) -> list[ModelRecord]:
        """All models of a name."""
        return [self._records[id] for id in (name, *self._namespaces.get(name, ())) if id in self._records]

    def drop(self, id: str) -> None:
        """Forget a model."""
        record = self._records.pop(id, None)
        if record is not None and (ids := self._namespaces.get(record.name)):
            ids.discard(id)
            if not ids:
                del self._namespaces[record.name]

    def find(self, name: str, version: str, namespace: str = "") -> Model:
        """The model that requests go to; version "" is the newest that is ready. Raises `ServerError`.

        Of models of the same name, the one in `namespace` is meant.
        """
        record = self._records.get(name)
        if record is None or namespace:
            record = self._resolve(name, namespace)
        if version in ("", "-1"):
            for slot in reversed(record.slots.values()):
                if slot.model is not None:
                    return slot.model
            raise Unavailable(f"{_unknown(name)} has no available versions")
        if not version.isascii() or not version.isdigit() or len(version) > _MOST_DIGITS:
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
        beside = self._records.get(f"{namespace}::{name}") if namespace else None
        if beside is not None and not beside.unloaded:
            return beside
        found = self.named(name)
        if len(found) > 1:  # those that are unloaded make nothing ambiguous
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
        """Ensembles of which a step has changed since they were loaded, or failed to be."""
        return [
            record
            for record in self
            if record.wanted is not None
            and any(
                step.changed > record.checked
                for name in record.steps
                for step in self.named(name)
                if step is not record
            )
        ]


def _unknown(name: str) -> str:
    return f"Request for unknown model: '{name}'"
