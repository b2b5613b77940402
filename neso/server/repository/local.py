"""A repository that is a directory."""

from __future__ import annotations

from pathlib import Path

from neso.server.errors import NotFound
from neso.server.repository.fingerprint import Fingerprint
from neso.server.repository.source import ModelSource


class LocalRepository:
    """A directory that holds a folder per model: `<model>/config.pbtxt`, `<model>/<version>/…`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self.uri = str(self._directory)

    def check(self) -> None:
        """Raises `NotFound` if there is no such directory."""
        if not self._directory.is_dir():
            raise NotFound(f"model repository '{self.uri}' is not a directory")

    def folders(self) -> list[str]:
        """The names of the models' folders. Raises `OSError`."""
        return [
            path.name for path in self._directory.iterdir() if not path.name.startswith(".") and path.is_dir()
        ]

    def listed(self) -> list[str]:
        """`folders` without waiting for a network, and without an error."""
        return self.folders() if self._directory.is_dir() else []

    def holds(self, folder: str) -> bool:
        return (self._directory / folder).is_dir()

    def source(self, name: str, folder: str) -> ModelSource:
        """A model of that name in that folder. Raises `OSError`."""
        directory = self._directory / folder
        return ModelSource(
            name, directory, fingerprint=Fingerprint.of_folder(directory), renamed=name != folder
        )
