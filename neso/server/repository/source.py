"""Model sources in a local repository: names, versions, fingerprints."""

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
    """The version folders of a model, ascending."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_version(path.name) and path.is_dir())


def is_version(name: str) -> bool:
    """Whether a folder of that name is a version: a positive integer without leading zeros."""
    return name.isascii() and name.isdigit() and name[0] != "0"


def choose_versions(available: list[int], policy: Any, name: str) -> list[int]:
    """The versions that a `ModelVersionPolicy` selects. Raises `InvalidArgument` if there are none."""
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
            wanted = ", ".join(str(version) for version in policy.specific.versions)
            raise InvalidArgument(
                f"at least one version must be available under the version policy of model '{name}': "
                f"wanted {wanted}, found {', '.join(str(version) for version in available)}"
            )
        return chosen
    return available[-max(policy.latest.num_versions, 1) :]


CONFIGURATION = frozenset({"config.pbtxt", "configs"})
"""Entries of a model's folder that hold its configuration, which is compared by what it says."""


@dataclass(frozen=True)
class Fingerprint:
    """For each entry of the folder, a number that changes when a file in it does. Two that are equal are one state."""

    parts: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, directory: Path) -> Fingerprint:
        """By names, sizes and modification times. Blocks. Hidden files and bytecode do not count.

        Raises `OSError` for a folder that cannot be read.
        """
        return cls.of_files(_files(str(directory), "", ()))

    @classmethod
    def of_files(cls, files: Iterable[tuple[str, object]]) -> Fingerprint:
        """Of paths relative to the folder, each with something that changes when the file does."""
        parts: defaultdict[str, list[tuple[str, object]]] = defaultdict(list)
        for path, mark in files:
            parts[path.partition("/")[0]].append((path, mark))
        return cls({name: hash(tuple(sorted(marks))) for name, marks in parts.items()})

    def same_version(self, other: Fingerprint, version: int) -> bool:
        """Whether a version's files, and those that all versions share, are the same in both."""
        return self._version(version) == other._version(version)

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
            except FileNotFoundError:  # gone meanwhile, or a link to nothing
                continue
            path = prefix + entry.name
            if not stat.S_ISDIR(status.st_mode):
                yield path, (status.st_mtime_ns, status.st_size)
                continue
            yield f"{path}/", (0, 0)
            folder = (status.st_dev, status.st_ino)
            if folder not in above:  # a link may lead back
                yield from _files(entry.path, f"{path}/", (*above, folder))


Scratch = tempfile.TemporaryDirectory[str]


def make_scratch() -> Scratch:
    """A folder for a model's files, that lasts as long as the object."""
    return tempfile.TemporaryDirectory(prefix="neso-model-")


@dataclass(frozen=True)
class ModelSource:
    """A model's folder, and what a request to load has put in place of its parts.

    `namespace` is the repository where models of several repositories may have the same name, else empty.
    `fingerprint` is that of the folder; without one, the files are taken to be others than those that are loaded.
    `config` replaces config.pbtxt; `overridden`: by request, the next load goes back to what the folder holds.
    `renamed`: the folder has another name. `scratch` owns a temporary `directory`. With `fetch` the directory is not
    there before `localized`.
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
        """The name among all models of the server."""
        return f"{self.namespace}::{self.name}" if self.namespace else self.name

    def localized(self) -> ModelSource:
        """The same with the folder on this machine. Blocks. Raises `ServerError`."""
        if self.fetch is None:
            return self
        scratch = self.fetch()
        return replace(self, directory=Path(scratch.name), scratch=scratch, fetch=None)

    def with_config(self, config: str) -> ModelSource:
        """The files of the folder with another configuration, in JSON. Raises `InvalidArgument`."""
        return replace(self, config=config_from_json(config), overridden=True)


def source_of_files(name: str, config: str | None, files: Mapping[str, bytes]) -> ModelSource:
    """A model that a request brings as a whole. Blocks. Raises `InvalidArgument`."""
    if config is None:
        raise InvalidArgument(
            f"failed to load '{name}', override of model directory requires the model config as well"
        )
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


def _write_file(root: Path, key: str, content: bytes) -> None:
    try:
        path = (root / key.removeprefix("file:")).resolve()
        if not path.is_relative_to(root) or path == root:
            raise InvalidArgument(f"invalid file name '{key}', it must stay inside the model's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:  # too long, or a file and a folder at once
        raise InvalidArgument(f"invalid file name '{key[:100]}': {error.strerror}") from None
    except ValueError:
        raise InvalidArgument(f"invalid file name {key!r}") from None


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
