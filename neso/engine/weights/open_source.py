"""From a path to the source of weights that it is."""

from __future__ import annotations

from pathlib import Path

from neso.engine.weights.checkpoint import Checkpoint
from neso.engine.weights.engine_directory import EngineDirectory, is_engine_directory
from neso.engine.weights.gguf.checkpoint import GGUFCheckpoint
from neso.engine.weights.source import WeightSource


def open_source(path: Path | str) -> WeightSource:
    """Open a Hugging Face checkpoint directory, a GGUF file, or an engine directory of `neso build`.

    Raises `CheckpointError` for what is broken.
    """
    path = Path(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    return EngineDirectory(path) if is_engine_directory(path) else Checkpoint(path)
