"""Directories of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neso.server.errors import InvalidArgument, NotFound


class ModelRepository:
    """One or more directories that hold a folder per model: `<model>/config.pbtxt`, `<model>/<version>/…`."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directories = tuple(Path(directory).absolute() for directory in directories)

    def check(self) -> None:
        """Raises `NotFound` for a directory that does not exist."""
        for directory in self.directories:
            if not directory.is_dir():
                raise NotFound(f"model repository '{directory}' is not a directory")

    def names(self) -> list[str]:
        """The models of all directories, sorted."""
        found: set[str] = set()
        for directory in self.directories:
            if directory.is_dir():
                found.update(
                    path.name
                    for path in directory.iterdir()
                    if path.is_dir() and not path.name.startswith(".")
                )
        return sorted(found)

    def find(self, name: str) -> Path:
        """The folder of a model. Raises `NotFound`, and `InvalidArgument` for a bad or an ambiguous name."""
        check_model_name(name)
        found = [directory / name for directory in self.directories if (directory / name).is_dir()]
        if not found:
            raise NotFound(f"model '{name}' is in no model repository")
        if len(found) > 1:
            raise InvalidArgument(f"model '{name}' is not unique across all model repositories")
        return found[0]


def check_model_name(name: str) -> None:
    """Raises `InvalidArgument` for a name that could lead out of the repository."""
    if not name or name in (".", "..") or any(character in name for character in "/\\\0"):
        raise InvalidArgument(
            f"invalid model name '{name}', it must be the name of a folder of the repository"
        )


def stays_inside(filename: str) -> bool:
    """Whether a file that a configuration names is below the folder it is read from.

    By name only: a configuration may come from a client, a link in the folder is the owner's.
    """
    path = Path(filename)
    return not path.is_absolute() and ".." not in path.parts


def find_versions(directory: Path) -> list[int]:
    """The version folders of a model, ascending: names that are positive integers without leading zeros."""
    if not directory.is_dir():
        return []
    return sorted(
        int(path.name)
        for path in directory.iterdir()
        if path.name.isascii() and path.name.isdigit() and path.name[0] != "0" and path.is_dir()
    )


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
