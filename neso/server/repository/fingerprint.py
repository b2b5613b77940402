"""What a model's folder looked like, so that a later look tells what is to be loaded again."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from neso.server.repository.versions import is_version

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
