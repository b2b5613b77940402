"""Names of models and files that may come from a client."""

from __future__ import annotations

from pathlib import Path

from neso.server.errors import InvalidArgument


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
