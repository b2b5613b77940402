"""Sources of models: folders in local repositories, their versions and fingerprints."""

from __future__ import annotations

import os
import stat
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from neso.server.config.model_config import config_from_json
from neso.server.errors import InvalidArgument, NotFound


def find_versions(directory: Path) -> list[int]:
    """Return the version numbers of a model in ascending order."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_version(path.name) and path.is_dir())


def is_version(name: str) -> bool:
    """Return whether a folder name is a version: a positive integer without leading zeros."""
    return name.isascii() and name.isdigit() and name[0] != "0"


def choose_versions(available: list[int], policy: Any, name: str) -> list[int]:
    """Return the versions selected by a `ModelVersionPolicy`. Raises `InvalidArgument` if there are none."""
    if not available:
        raise InvalidArgument(
            f"at least one version must be available under the version policy of model '{name}'"
        )
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return available
    if choice == "specific":
        chosen = [version for version in available if version in set(policy.specific.versions)]
        if not chosen:
            requested = ", ".join(str(version) for version in policy.specific.versions)
            raise InvalidArgument(
                f"at least one version must be available under the version policy of model '{name}': "
                f"requested {requested}, found {', '.join(str(version) for version in available)}"
            )
        return chosen
    return available[-max(policy.latest.num_versions, 1) :]


CONFIGURATION = frozenset({"config.pbtxt", "configs"})
"""Configuration files in a model's folder; compared by content, not by fingerprint."""


@dataclass(frozen=True)
class Fingerprint:
    """State of a model's folder: a hash for each entry. Equal fingerprints mean unchanged files."""

    parts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, directory: Path) -> Fingerprint:
        """Compute the fingerprint from names, sizes and modification times, except hidden files and bytecode. Blocks.

        Raises `OSError` for a folder that cannot be read.
        """
        return cls.of_files(_files(str(directory), "", ()))

    @classmethod
    def of_files(cls, files: Iterable[tuple[str, object]]) -> Fingerprint:
        """Compute the fingerprint from relative paths, each with a value that changes when the file changes."""
        parts: defaultdict[str, list[tuple[str, object]]] = defaultdict(list)
        for path, mark in files:
            parts[path.partition("/")[0]].append((path, mark))
        return cls({name: hash(tuple(sorted(marks))) for name, marks in parts.items()})

    def same_version(self, other: Fingerprint, version: int) -> bool:
        """Return whether the files of a version and the files shared by all versions are unchanged."""
        return self._version(version) == other._version(version)

    def same_configuration(self, other: Fingerprint) -> bool:
        """Return whether the configuration files are unchanged."""
        return all(self.parts.get(name) == other.parts.get(name) for name in CONFIGURATION)

    def _version(self, version: int) -> dict[str, int]:
        return {
            name: mark
            for name, mark in self.parts.items()
            if name == str(version) or not (name in CONFIGURATION or is_version(name))
        }


def _files(directory: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[str, object]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name == "__pycache__":
                continue
            try:
                status = entry.stat()
            except FileNotFoundError:  # removed concurrently, or a dangling link
                continue
            path = prefix + entry.name
            if not stat.S_ISDIR(status.st_mode):
                yield path, (status.st_mtime_ns, status.st_size)
                continue
            yield f"{path}/", (0, 0)
            folder = (status.st_dev, status.st_ino)
            if folder not in above:  # a link can refer to a parent folder
                yield from _files(entry.path, f"{path}/", (*above, folder))


Scratch = tempfile.TemporaryDirectory[str]


def make_scratch() -> Scratch:
    """Create a temporary folder for a model's files. It is removed with the returned object."""
    return tempfile.TemporaryDirectory(prefix="neso-model-")


@dataclass(frozen=True)
class ModelSource:
    """A model's folder, and the overrides of a load request.

    - namespace: the repository if namespacing is enabled; otherwise empty
    - fingerprint: fingerprint of the folder; if None, the files count as changed
    - config: configuration that replaces config.pbtxt
    - overridden: `config` comes from a request. Loads without a configuration keep it, see `with_kept_config`
    - renamed: the folder has a different name than the model
    - scratch: owner of a temporary `directory`
    - fetch: downloads the directory, which exists only after `localized`
    """

    name: str
    directory: Path
    namespace: str = ""
    fingerprint: Fingerprint | None = None
    config: Any | None = None
    overridden: bool = False
    renamed: bool = False
    scratch: Scratch | None = None
    fetch: Callable[[], Scratch] | None = None

    @property
    def id(self) -> str:
        """Unique id among the models of the server."""
        return f"{self.namespace}::{self.name}" if self.namespace else self.name

    def localized(self) -> ModelSource:
        """Return the source with a local folder; download it if necessary. Blocks. Raises `ServerError`."""
        if self.fetch is None:
            return self
        scratch = self.fetch()
        return replace(self, directory=Path(scratch.name), scratch=scratch, fetch=None)

    def with_config(self, config: str) -> ModelSource:
        """Return the source with another configuration (JSON). Raises `InvalidArgument`."""
        return replace(self, config=config_from_json(config), overridden=True)

    def with_kept_config(self, loaded: ModelSource | None) -> ModelSource:
        """Return the source with the configuration of an earlier load request, as long as the files of the
        configuration are unchanged since then. `loaded`: source of the serving versions.

        Not after a load request with files, which replaced the whole folder.
        """
        if loaded is None or not loaded.overridden or self.config is not None:
            return self
        before, now = loaded.fingerprint, self.fingerprint
        if before is None or now is None or not now.same_configuration(before):
            return self
        return replace(self, config=loaded.config, overridden=True)


def source_of_files(name: str, config: str | None, files: Mapping[str, bytes]) -> ModelSource:
    """Create the source of a model whose files are in the load request. Blocks. Raises `InvalidArgument`."""
    if config is None:
        raise InvalidArgument(f"override of the folder of model '{name}' requires the model config as well")
    message = config_from_json(config)
    scratch = _write_files(files)
    return ModelSource(name, Path(scratch.name), config=message, overridden=True, scratch=scratch)


def _write_files(files: Mapping[str, bytes]) -> Scratch:
    scratch = make_scratch()
    root = Path(scratch.name).resolve()
    try:
        for key, content in files.items():
            _write_file(root, key, content)
    except BaseException:
        scratch.cleanup()
        raise
    return scratch


_MAX_FILE_DEPTH = 64
"""Maximum number of nested folders of a file in a load request."""


def _write_file(root: Path, key: str, content: bytes) -> None:
    try:
        name = key.removeprefix("file:").lstrip("/")
        if name.count("/") > _MAX_FILE_DEPTH:
            raise InvalidArgument(
                f"invalid file name '{key[:100]}', it has more than {_MAX_FILE_DEPTH} folders"
            )
        path = (root / name).resolve()
        if not path.is_relative_to(root) or path == root:
            raise InvalidArgument(f"invalid file name '{key}', it must stay inside the model's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:  # path too long, or a file where a folder is needed
        raise InvalidArgument(f"invalid file name '{key[:100]}': {error.strerror}") from None
    except ValueError:
        raise InvalidArgument(f"invalid file name {key!r}") from None


class LocalRepository:
    """A directory with a folder per model: `<model>/config.pbtxt`, `<model>/<version>/…`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()
        self.uri = str(self._directory)

    def check(self) -> None:
        """Raise `NotFound` if the directory does not exist."""
        if not self._directory.is_dir():
            raise NotFound(f"model repository '{self.uri}' is not a directory")

    def folders(self) -> list[str]:
        """Return the names of the model folders. Raises `OSError`."""
        return [
            path.name for path in self._directory.iterdir() if not path.name.startswith(".") and path.is_dir()
        ]

    def listed(self) -> list[str]:
        """Like `folders`, but empty if the directory does not exist."""
        return self.folders() if self._directory.is_dir() else []

    def holds(self, folder: str) -> bool:
        return (self._directory / folder).is_dir()

    def source(self, name: str, folder: str) -> ModelSource:
        """Return the source of the model in a folder. Raises `OSError`."""
        directory = self._directory / folder
        return ModelSource(
            name, directory, fingerprint=Fingerprint.of_folder(directory), renamed=name != folder
        )
