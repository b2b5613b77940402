"""`batch_input`: tensors that tell a model how the requests of its batch are laid out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.datatypes import DataType
from neso.server.signature import Shape
from neso.server.tensor import element_count


def make_batch_input(spec: Any, shapes: list[Shape]) -> npt.NDArray[Any]:
    """The tensor of a `BatchInput` message, from the shapes of its source input in each of n requests.

    | kind | shape |
    |---|---|
    | BATCH_ELEMENT_COUNT | [n]: elements of each request |
    | BATCH_ACCUMULATED_ELEMENT_COUNT | [n]: elements of each request and those before it |
    | BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO | [n + 1]: the same, with 0 in front |
    | BATCH_MAX_ELEMENT_COUNT_AS_SHAPE | [elements of the largest request]: only the shape says something |
    | BATCH_ITEM_SHAPE | [rows of all requests, dimensions]: the shape of each row, without the batch dimension |
    | BATCH_ITEM_SHAPE_FLATTEN | the same, as [rows * dimensions] |
    """
    dtype = DataType.of_message(spec).dtype
    kind = spec.Kind.Name(spec.kind)
    if kind.startswith("BATCH_ITEM_SHAPE"):
        rows = [np.tile(np.array(shape[1:], dtype), (shape[0], 1)) for shape in shapes]
        # Requests of other ranks cannot come: `dims` has one.
        items = np.concatenate(rows)
        return items.reshape(-1) if kind == "BATCH_ITEM_SHAPE_FLATTEN" else items
    counts = [element_count(shape) for shape in shapes]
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(max(counts), dtype)
    if kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts, dtype)
    accumulated = np.cumsum([0, *counts]) if kind.endswith("WITH_ZERO") else np.cumsum(counts)
    return accumulated.astype(dtype)
