"""The models of an in-process server, by name and version."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from neso.server.inprocess.model import Model
from neso.server.metadata import IndexEntry

if TYPE_CHECKING:
    from neso.server.inprocess.server import Server


class Models(Mapping[tuple[str, str], Model]):
    """Maps `(name, version)` to a model, and a name alone to the model in its newest version that is ready."""

    def __init__(self, server: Server, entries: Iterable[IndexEntry]) -> None:
        self._server = server
        self._models = {
            (entry.name, entry.version): Model(server, entry.name, entry.version, entry.state, entry.reason)
            for entry in entries
        }

    def __getitem__(self, key: str | tuple[str, str | int]) -> Model:
        if isinstance(key, tuple):
            name, version = key
            return self._models[name, str(version)]
        if any(name == key for name, _ in self._models):
            return Model(self._server, key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def __repr__(self) -> str:
        return f"Models({list(self._models)!r})"
