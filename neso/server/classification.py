"""The classification extension: an output as its largest values, with their indices and labels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.datatypes import DataType
from neso.server.errors import InvalidArgument
from neso.server.repository import stays_inside
from neso.server.tensor import Tensor, element_count


class Classifier:
    """Knows the labels of one model version's outputs, and turns outputs into classes."""

    def __init__(self, config: Any, directory: Path) -> None:
        """Read the labels, from files in the model's folder `directory`. Raises `InvalidArgument`."""
        self._batched = config.max_batch_size > 0
        self._labels = {
            output.name: _read_labels(directory, output.label_filename, config.name)
            for output in config.output
            if output.label_filename
        }

    def classify(self, outputs: list[Tensor], wanted: Mapping[str, int]) -> list[Tensor]:
        """`outputs`, those in `wanted` as their so many classes. Raises `InvalidArgument`."""
        return [
            self._classes(tensor, wanted[tensor.name]) if tensor.name in wanted else tensor
            for tensor in outputs
        ]

    def _classes(self, tensor: Tensor, count: int) -> Tensor:
        """BYTES of shape [batch, n] (or [n] without batching), n at most the elements of one batch entry.

        Each element is "value:index" or "value:index:label", the largest value first; of equal values, the one
        with the smaller index.
        """
        check_datatype(tensor.datatype)
        batch = tensor.shape[:1] if self._batched else ()
        size = element_count(tensor.shape[len(batch) :])
        count = min(count, size)
        labels = self._labels.get(tensor.name, [])
        rows = batch[0] if batch else 1
        texts = np.empty((rows, count), np.object_)
        for row, values in zip(texts, tensor.array.reshape(rows, size), strict=True):
            row[:] = [_text(values[i], int(i), labels) for i in largest(values, count)]
        return Tensor(tensor.name, DataType.BYTES, texts.reshape(*batch, count))


def check_datatype(datatype: DataType) -> None:
    """Refuse outputs that have no largest value. Raises `InvalidArgument` with Triton's wording."""
    if datatype in (DataType.BYTES, DataType.BOOL):
        raise InvalidArgument(
            f"class result not available for output due to unsupported type '{datatype.value}'"
        )


def largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """The indices of the `count` largest of `values` [n], in descending order. NaN counts as least."""
    if values.dtype.kind not in "iu":  # floats: float64 holds each of them exactly
        values = values.astype(np.float64)
        values = np.where(np.isnan(values), -np.inf, values)
    # Backwards twice: a stable sort in ascending order, and yet the smaller index first among equals.
    backwards = np.argsort(values[::-1], kind="stable")[::-1][:count]
    return len(values) - 1 - backwards


def _text(value: Any, index: int, labels: list[str]) -> bytes:
    """As C++'s `std::to_string`: six decimals, integers without any."""
    number = str(value) if isinstance(value, np.integer) else f"{float(value):f}"
    text = f"{number}:{index}"
    label = labels[index] if index < len(labels) else ""
    return (f"{text}:{label}" if label else text).encode()


def _read_labels(directory: Path, filename: str, model: str) -> list[str]:
    """One label a line; an empty line is an index without label. The file must be in `directory`."""
    if not stays_inside(filename):
        raise InvalidArgument(
            f"label file '{filename}' of model '{model}' must stay inside the model's folder"
        )
    try:
        text = (directory / filename).read_text(encoding="utf-8")
        return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"unable to read the label file of model '{model}': {error}") from None
