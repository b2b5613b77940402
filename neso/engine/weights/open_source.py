"""From a path to the source of weights that it is."""

from __future__ import annotations

from pathlib import Path

from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.gguf.checkpoint import GGUFCheckpoint
from neso.engine.weights.source import WeightSource


def open_source(path: Path | str) -> WeightSource:
    """Open a Hugging Face checkpoint directory or a GGUF file. Raises `CheckpointError` for what is broken."""
    path = Path(path)
    return GGUFCheckpoint(path) if path.is_file() else Checkpoint(path)
