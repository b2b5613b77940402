"""Checks of model and file names that can come from a client."""

from __future__ import annotations

from pathlib import Path

from neso.server.errors import InvalidArgument


def check_model_name(name: str) -> None:
    """Raises `InvalidArgument` for a name that could refer outside the repository."""
    if not name or name in (".", "..") or any(character in name for character in "/\\\0"):
        raise InvalidArgument(
            f"invalid model name '{name}', it must be the name of a folder of the repository"
        )


def stays_inside(filename: str) -> bool:
    """Whether a file name in a configuration stays below the model's folder.

    Checks the name only: the configuration can come from a client, links in the folder belong to its owner.
    """
    path = Path(filename)
    return not path.is_absolute() and ".." not in path.parts
