"""Where a runner gets weights from, whatever the format of the files."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from neso.engine.weights.float8_matrix import Float8Matrix
from neso.engine.weights.quantized_matrix import QuantizedMatrix

Matrix = npt.NDArray[Any] | QuantizedMatrix | Float8Matrix


def dense(matrix: Matrix) -> npt.NDArray[Any]:
    """The weights [outputs, inputs] in a float dtype: quantized ones as the float32 values that they stand for."""
    return matrix.dequantize() if isinstance(matrix, (QuantizedMatrix, Float8Matrix)) else matrix


class WeightSource(Protocol):
    """Tensors by their Hugging Face names. A context manager; tensors handed out before `close` stay valid.

    - directory: the path that was opened, for messages
    - config: the model's config.json, or what it would be
    """

    directory: Path
    config: dict[str, Any]

    def __contains__(self, name: str) -> bool:
        """Whether there is such a weight, dense or quantized."""

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """A read-only view in the dtype of the file, maybe unaligned; quantized ones are not to be had this way.

        Raises `CheckpointError` when it is missing or does not have `shape`.
        """

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """Weights [outputs, inputs] as they are stored: dense in a float dtype, or quantized.

        Raises `CheckpointError` when they are missing, have another shape or a type that is not supported.
        """

    def read_float32(self, name: str, target: npt.NDArray[np.float32]) -> None:
        """Copy into `target`, converted and dequantized. Raises `CheckpointError` as the others do."""

    def close(self) -> None: ...

    def __enter__(self) -> WeightSource: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
