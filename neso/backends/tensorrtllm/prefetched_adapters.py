"""Adapters that a model starts with: a directory of TensorRT-LLM's, with a folder for each task id.

PREFETCH_DIR/7/model.lora_weights.npy    [1, rows, width]
PREFETCH_DIR/7/model.lora_config.npy     [1, rows, 3]
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.backends.llm.tensor_request import adapter_of_task
from neso.generation import LoraRequest
from neso.server.errors import InvalidArgument


def read_adapters(directory: Path) -> Iterator[LoraRequest]:
    """Those of the folders whose names are numbers. Raises `InvalidArgument` that names the file."""
    for folder in sorted(path for path in directory.iterdir() if path.is_dir() and path.name.isdecimal()):
        weights, config = (_read(folder / f"model.lora_{what}.npy") for what in ("weights", "config"))
        try:
            yield adapter_of_task(int(folder.name), weights, config)
        except InvalidArgument as error:
            raise InvalidArgument(f"{folder}: {error.message}") from None


def _read(path: Path) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: cannot be read: {error}") from None
    return array
