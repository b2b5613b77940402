"""The versions of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neso.server.errors import InvalidArgument


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
