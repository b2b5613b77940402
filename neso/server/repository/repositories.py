"""The model repositories of a server."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from neso.server.errors import AlreadyExists, InvalidArgument, NotFound
from neso.server.repository.cloud import CloudRepository, is_cloud_uri
from neso.server.repository.names import check_model_name, is_inside
from neso.server.repository.source import LocalRepository, ModelSource

logger = logging.getLogger(__name__)


IN_SEVERAL = "model appears in two or more repositories"
"""Reason for a model that is not loaded because its name is ambiguous; Triton's message."""


class Repository(Protocol):
    """A repository with `<folder>/config.pbtxt` and `<folder>/<version>/…` for each model."""

    uri: str

    def check(self) -> None: ...

    def folders(self) -> list[str]: ...

    def listed(self) -> list[str]: ...

    def holds(self, folder: str) -> bool: ...

    def source(self, name: str, folder: str) -> ModelSource: ...


def open_repository(uri: str | Path) -> Repository:
    """Open a directory or a bucket URI. Raises `ServerError` for an unsupported URI."""
    if isinstance(uri, str) and is_cloud_uri(uri):
        return CloudRepository(uri)
    return LocalRepository(Path(uri))


@dataclass
class Scan:
    """Contents of all repositories: sources by model id, and ambiguous names."""

    sources: dict[str, ModelSource] = field(default_factory=dict)
    ambiguous: set[str] = field(default_factory=set)


class ModelRepositories:
    """Finds models by name in all repositories.

    A name in several repositories is an error, or with `namespacing` a separate model in each repository. Methods
    marked as blocking wait for files or the network.
    """

    def __init__(self, uris: Iterable[str | Path] = (), *, namespacing: bool = False) -> None:
        self._namespacing = namespacing
        self._repositories: dict[str, Repository] = {}
        self._mappings: dict[str, tuple[str, str]] = {}  # model name to repository and folder
        for uri in uris:
            repository = open_repository(uri)
            self._repositories[repository.uri] = repository

    def check(self) -> None:
        """Raise `NotFound` for a missing repository. Blocks."""
        for repository in self._repositories.values():
            repository.check()

    def register(self, uri: str | Path, mapping: Mapping[str, str] | None = None) -> None:
        """Add a repository. `mapping`: model name to folder name, for models where these differ. Blocks.

        Raises `AlreadyExists` for an already registered repository or mapped name, `InvalidArgument`.
        """
        try:
            repository = open_repository(uri)
            repository.check()
        except NotFound:
            raise InvalidArgument(f"failed to register '{uri}', repository not found") from None
        if repository.uri in self._repositories:
            raise AlreadyExists(f"model repository '{uri}' has already been registered")
        for name, folder in (mapping or {}).items():
            check_model_name(name)
            if not is_inside(folder):
                raise InvalidArgument(f"failed to register '{name}', '{folder}' is not in the repository")
            if name in self._mappings:
                raise AlreadyExists(
                    f"failed to register '{name}', there is a conflicting mapping for '{name}'"
                )
        self._repositories[repository.uri] = repository
        for name, folder in (mapping or {}).items():
            self._mappings[name] = repository.uri, folder
        logger.info("model repository registered: %s", repository.uri)

    def unregister(self, uri: str | Path) -> None:
        """Remove a repository; loaded models stay loaded. Raises `InvalidArgument` for an unknown repository."""
        known = open_repository(uri).uri
        if self._repositories.pop(known, None) is None:
            raise InvalidArgument(f"failed to unregister '{uri}', repository not found")
        self._mappings = {name: place for name, place in self._mappings.items() if place[0] != known}
        logger.info("model repository unregistered: %s", known)

    def names(self) -> set[str]:
        """Return the names of the models in all repositories; for cloud storage as of the last scan."""
        return {
            name
            for repository in self._repositories.values()
            for name in self._named(repository, repository.listed())
        }

    def scan(self) -> Scan:
        """Scan all repositories. Blocks. Raises `OSError` if a repository cannot be read."""
        scan = Scan()
        for repository in self._repositories.values():
            for name, folder in self._named(repository, repository.folders()).items():
                try:
                    source = self._in_namespace(repository, repository.source(name, folder))
                except FileNotFoundError:  # removed concurrently
                    continue
                if scan.sources.setdefault(source.id, source) is not source:
                    scan.ambiguous.add(name)
        for name in scan.ambiguous:
            del scan.sources[name]
        return scan

    def find(self, name: str) -> list[ModelSource]:
        """Return the sources of the models with this name: one, or one per namespace. Blocks.

        Raises `NotFound`, and `InvalidArgument` for an invalid or ambiguous name.
        """
        check_model_name(name)
        found = []
        try:
            for repository in self._repositories.values():
                folder = self._folder(repository, name)
                if folder is not None and repository.holds(folder):
                    found.append(self._in_namespace(repository, repository.source(name, folder)))
        except OSError as error:
            raise NotFound(f"model '{name}' cannot be read: {error}") from None
        if not found:
            raise NotFound(f"model '{name}' is in no model repository")
        if len(found) > 1 and not self._namespacing:
            raise InvalidArgument(IN_SEVERAL)
        return found

    def find_one(self, name: str, namespace: str) -> ModelSource:
        """Return the source of a dependency of a model in `namespace`: in that namespace, or else the only one. Blocks.

        Raises `NotFound`, `InvalidArgument`.
        """
        found = self.find(name)
        beside = [source for source in found if source.namespace == namespace]
        if not beside and len(found) > 1:
            raise InvalidArgument(f"model '{name}' is ambiguous, {len(found)} model repositories have it")
        return (beside or found)[0]

    def _in_namespace(self, repository: Repository, source: ModelSource) -> ModelSource:
        return replace(source, namespace=repository.uri) if self._namespacing else source

    def _folder(self, repository: Repository, name: str) -> str | None:
        """Return the folder of a model in a repository."""
        if name in self._mappings:
            uri, folder = self._mappings[name]
            return folder if uri == repository.uri else None
        return None if (repository.uri, name) in self._mappings.values() else name

    def _named(self, repository: Repository, folders: Iterable[str]) -> dict[str, str]:
        """Return the folders of a repository by model name."""
        mapped = {folder: name for name, (uri, folder) in self._mappings.items() if uri == repository.uri}
        return {mapped.get(folder, folder): folder for folder in folders}
