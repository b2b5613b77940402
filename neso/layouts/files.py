"""The files of a repository, written at once or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


class FilesExist(Exception):
    """There are files already where some are to be written; the message names the first."""


def write_files(directory: Path, files: Mapping[str, str], *, overwrite: bool = False) -> None:
    """Write texts at their paths below a directory, which is made. Raises `FilesExist` and `OSError`.

    Files that are not among them stay; those that are, and would not change, are no obstacle.
    """
    if not overwrite:
        for path, text in files.items():
            target = directory / path
            if target.exists() and target.read_text() != text:
                raise FilesExist(f"{target} is there already and differs; --force replaces it")
    for path, text in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
