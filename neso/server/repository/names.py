"""Checks of model names and file names received from clients."""

from __future__ import annotations

from pathlib import Path

from neso.server.errors import InvalidArgument


def check_model_name(name: str) -> None:
    """Raise `InvalidArgument` for a name that could refer to a path outside the repository."""
    trimmed = name.strip()
    if not trimmed:
        raise InvalidArgument("Model name cannot be empty. Please enter a valid name to deploy.")
    if trimmed in (".", "..") or any(character in name for character in "/\\\0"):
        raise InvalidArgument(
            f"invalid model name '{name}', model name must not contain path traversal characters"
        )


def is_inside(filename: str) -> bool:
    """Return whether a file name in a configuration stays below the model's folder.

    Checks only the name, because the configuration can come from a client. Links in the folder are trusted.
    """
    path = Path(filename)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in filename
