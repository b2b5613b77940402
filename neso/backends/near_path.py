"""Paths that may be relative to the folders of a model."""

from __future__ import annotations

from pathlib import Path


def near_path(path: str | Path, *places: Path) -> Path | None:
    """A file or directory: absolute, or relative to the first of `places` that has it; None if there is none."""
    return next((found for place in places if (found := place / path).exists()), None)
