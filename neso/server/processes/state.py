"""State that the main process pushes to the front-end processes: models, settings, shared-memory regions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from neso.server.metadata import ModelState, ServerMetadata
from neso.server.options import LogOptions
from neso.server.shared_memory.regions import Registration

if TYPE_CHECKING:
    from neso.server.core import Core
    from neso.server.model import Model


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A loaded model version, as front-end processes need it.

    - key: number of this load; a reloaded model has another one
    - config: the `ModelConfig` message, serialized
    - forwards_tensors: requests with tensors go through the main process even with `share`
    - share: how a front-end process uses the model without the main process, see `Backend.share`; None if it cannot
    """

    key: int
    name: str
    version: str
    namespace: str
    config: bytes
    directory: Path
    version_directory: Path
    forwards_tensors: bool
    share: Any


@dataclass(frozen=True, slots=True)
class SlotDescription:
    """A version in the table of models. `key`: that of its loaded model, 0 if none."""

    version: int
    state: ModelState
    reason: str
    unloaded: bool
    key: int


@dataclass(frozen=True, slots=True)
class RecordDescription:
    """A model in the table."""

    id: str
    name: str
    slots: tuple[SlotDescription, ...]


@dataclass(frozen=True, slots=True)
class ServerState:
    """Everything that front-end processes answer from their own memory, except the descriptions of models.

    `ready_keys`: keys of the models that accept requests.
    """

    ready: bool
    live: bool
    stopping: bool
    metadata: ServerMetadata
    records: tuple[RecordDescription, ...]
    ready_keys: frozenset[int]
    log: LogOptions
    regions: tuple[Registration, ...]


class StateReader:
    """Reads the state of a core. Gives each loaded model a key."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._keys: WeakKeyDictionary[Model, int] = WeakKeyDictionary()
        self._last_key = 0

    def key(self, model: Model) -> int:
        """Return the key of a model."""
        if model not in self._keys:
            self._last_key += 1
            self._keys[model] = self._last_key
        return self._keys[model]

    def read(self) -> ServerState:
        """Return the current state."""
        core = self._core
        records = tuple(
            RecordDescription(
                record.id,
                record.name,
                tuple(
                    SlotDescription(
                        version,
                        slot.state,
                        slot.reason,
                        slot.unloaded,
                        0 if slot.model is None else self.key(slot.model),
                    )
                    for version, slot in record.slots.items()
                ),
            )
            for record in core.records()
        )
        ready = frozenset(self.key(model) for model in core.models() if model.ready())
        return ServerState(
            core.ready(),
            core.live(),
            core.stopping,
            core.metadata(),
            records,
            ready,
            core.log.options,
            tuple(core.shared_memory.registrations.values()),
        )

    def describe(self, keys: set[int]) -> Iterator[ModelDescription]:
        """Yield the descriptions of the loaded models with these keys."""
        for record in self._core.records():
            for model in record.models:
                if (key := self.key(model)) in keys:
                    yield ModelDescription(
                        key,
                        model.name,
                        model.version,
                        namespace_of(record.id),
                        model.config.SerializeToString(),
                        model.directory,
                        model.version_directory,
                        model.forwards_tensors,
                        model.share(),
                    )


def namespace_of(record_id: str) -> str:
    """Return the namespace in the id of a record, `NAMESPACE::NAME`; "" without one."""
    return record_id.rpartition("::")[0]
