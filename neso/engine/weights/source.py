"""`TensorSource`: the interface to the tensors of a model, implemented once per file format.

    files            SafetensorsFile                        GGUFFile          headers and memory maps
                           |                                   |
    TensorSource     Checkpoint      EngineDirectory     GGUFCheckpoint      tensors by Hugging Face name
                           |                                   |
    model_tensors    DecoderTensors, EncoderTensors                           tensors by role in a spec

`checkpoint.open_source` opens any of them by path. Quantized weights are values (`quantized.Matrix`), and
transformations of them are plain functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from neso.engine.weights.quantized import Matrix

FLOAT_DTYPES = frozenset(np.dtype(kind) for kind in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))

Source = TypeVar("Source", bound="TensorSource")


class CheckpointError(Exception):
    """A checkpoint is unreadable or lacks a tensor that the model needs. The message names file and tensor."""


class TensorSource(ABC):
    """Tensors by their Hugging Face names. A context manager; returned tensors stay valid after `close`.

    - directory: the path that was opened, for messages
    - config: the model's config.json, or its equivalent
    """

    directory: Path
    config: dict[str, Any]

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """Whether a weight with this name exists, dense or quantized."""

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """Return a read-only view in the file's dtype, possibly unaligned (`flags.aligned`).

        Raises `CheckpointError` if it is missing, does not have `shape`, or is quantized and cannot be viewed.
        """

    @abstractmethod
    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """Return weights [outputs, inputs] as stored: dense in a float dtype, or quantized.

        Raises `CheckpointError` if they are missing, or have another shape or an unsupported dtype.
        """

    @abstractmethod
    def read_float32(self, name: str, target: npt.NDArray[np.float32]) -> None:
        """Copy a weight into `target`, converted and dequantized. Raises `CheckpointError` like `matrix`."""

    @abstractmethod
    def close(self) -> None:
        """Unmap the files."""

    def __enter__(self: Source) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether values of this dtype are weights; integers and float8 are codes that need scales."""
    return dtype in FLOAT_DTYPES


def copy_as_float32(source: npt.NDArray[Any], target: npt.NDArray[np.float32]) -> None:
    """Convert `source` into `target`, which has the same shape.

    ml_dtypes' cast is as fast as shifting bits, because both are bound by memory bandwidth (0.2 s for 213 M bfloat16).
    """
    np.copyto(target, source, casting="unsafe")
