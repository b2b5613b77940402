"""From the paths in config.pbtxt to the files of a model."""

from __future__ import annotations

import json
from pathlib import Path

from neso.backends.near_path import near_path
from neso.engine.weights.hub import ModelNotFound, resolve_model
from neso.server.errors import InvalidArgument

INSTEAD = "name a Hugging Face checkpoint, a GGUF file, or the directory that `neso build` makes of one"


def model_files(path: str | None, version_directory: Path, model_directory: Path) -> Path:
    """The model that `gpt_model_path` names, which the version's directory itself holds if it is unset.

    Absolute, relative to the version's or the model's directory, or a name: of a shipped model, or on the hub.
    Raises `InvalidArgument`.
    """
    if path is None:
        found = version_directory
    else:
        found = near_path(Path(path).expanduser(), version_directory, model_directory) or Path(path)
    _refuse_foreign_engine(found)
    try:
        resolved = resolve_model(found)
    except ModelNotFound as error:
        raise InvalidArgument(f"gpt_model_path: {error}") from None
    if resolved.is_dir() and not (resolved / "config.json").is_file():
        unset = "is not set, and " if path is None else ""
        raise InvalidArgument(f"gpt_model_path: {unset}{resolved} holds no model (no config.json); {INSTEAD}")
    return resolved


def _refuse_foreign_engine(directory: Path) -> None:
    """Engines of TensorRT, and the checkpoints that they are built from, are not read."""
    if any(directory.glob("*.engine")):
        raise InvalidArgument(
            f"gpt_model_path: {directory} holds an engine of TensorRT, which only runs there; {INSTEAD}"
        )
    try:
        config = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(config, dict) and ("pretrained_config" in config or "mapping" in config):
        raise InvalidArgument(
            f"gpt_model_path: {directory} holds a model that was converted for TensorRT-LLM; {INSTEAD}"
        )
