"""What a quantized checkpoint's format has to do, and what it may ask of the checkpoint."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

from neso.engine.weights.float8_matrix import Float8Matrix
from neso.engine.weights.quantized_matrix import QuantizedMatrix


class StoredTensors(Protocol):
    """The tensors that are in the files, by their names there."""

    def stores(self, name: str) -> bool: ...

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """A read-only view, maybe unaligned. Raises `CheckpointError` when it is missing or not of `shape`."""


class Format(Protocol):
    """Finds and reads the matrices that are quantized; the others in such a checkpoint are dense."""

    def holds(self, tensors: StoredTensors, name: str) -> bool:
        """Whether the weights of this name ("X.weight") are there in this format."""

    def read(
        self, tensors: StoredTensors, name: str, shape: tuple[int, int]
    ) -> QuantizedMatrix | Float8Matrix:
        """Weights [outputs, inputs] that it holds. Raises `CheckpointError` for tensors that do not fit."""
