"""Write the files of a model repository, and the files of single-model layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


class FilesExist(Exception):
    """A file already exists with different content."""


def write_files(directory: Path, files: Mapping[str, str], *, overwrite: bool = False) -> None:
    """Write `files` (content by path) below `directory`, creating it. Other files there are kept.

    Raises `FilesExist`, before anything is written, if a file exists with different content and `overwrite` is
    false; `OSError`.
    """
    if not overwrite:
        for path, text in files.items():
            target = directory / path
            if target.exists() and target.read_text() != text:
                raise FilesExist(f"{target} already exists and differs; use --force to replace it")
    for path, text in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def neso_files(name: str, model: str) -> dict[str, str]:
    """Return the files of a model on Neso's engine. Inputs and outputs are auto-completed on load."""
    return _single_model_files(name, "neso", {"model": model})


def vllm_files(name: str, model: str) -> dict[str, str]:
    """Return the files of a model of the vLLM backend; model.json contains vLLM's engine arguments."""
    return _single_model_files(name, "vllm", {"model": model})


def _single_model_files(name: str, backend: str, arguments: dict[str, str]) -> dict[str, str]:
    config = f'backend: "{backend}"\n\n# The engine decides where the model runs.\n'
    config += "instance_group [ { count: 1 kind: KIND_MODEL } ]\n"
    return {
        f"{name}/config.pbtxt": config,
        f"{name}/1/model.json": json.dumps(arguments, indent=2, ensure_ascii=False) + "\n",
    }
