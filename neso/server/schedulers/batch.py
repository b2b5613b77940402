"""Batches executed as tensors: concatenation of inputs, splitting of outputs.

Not used for Python models, which receive the individual requests of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.errors import InternalError, InvalidArgument
from neso.server.inference_response import ResponseStream
from neso.server.signature import Shape, Signature
from neso.server.tensor import DataType, Tensor, element_count


def make_batch_input(spec: Any, shapes: list[Shape]) -> npt.NDArray[Any]:
    """Create the tensor of a `BatchInput` message from the shapes of its source input in n requests.

    | kind | shape |
    |---|---|
    | BATCH_ELEMENT_COUNT | [n]: elements of each request |
    | BATCH_ACCUMULATED_ELEMENT_COUNT | [n]: cumulative elements |
    | BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO | [n + 1]: 0, then cumulative elements |
    | BATCH_MAX_ELEMENT_COUNT_AS_SHAPE | [elements of the largest request]: only the shape is used |
    | BATCH_ITEM_SHAPE | [rows of all requests, dimensions]: the shape of each row, without the batch dimension |
    | BATCH_ITEM_SHAPE_FLATTEN | the same, as [rows * dimensions] |
    """
    dtype = DataType.of_message(spec).dtype
    kind = spec.Kind.Name(spec.kind)
    if kind.startswith("BATCH_ITEM_SHAPE"):
        rows = [np.tile(np.array(shape[1:], dtype), (shape[0], 1)) for shape in shapes]
        # The inputs of all requests have the rank of `dims`.
        items = np.concatenate(rows)
        return items.reshape(-1) if kind == "BATCH_ITEM_SHAPE_FLATTEN" else items
    counts = [element_count(shape) for shape in shapes]
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(max(counts), dtype)
    if kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts, dtype)
    accumulated = np.cumsum([0, *counts]) if kind.endswith("WITH_ZERO") else np.cumsum(counts)
    return accumulated.astype(dtype)


Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Inputs of one execution, created by `collect`.

    - streams: the requests, in order
    - rows: batch size of each request; 1 for models that do not batch
    - inputs: by name, concatenated in the first dimension; inputs with `allow_ragged_batch` are flat, [elements of all
      requests]; `batch_input`s are generated. Those of a single request are not copied and must not be modified.
    """

    streams: list[ResponseStream]
    rows: list[int]
    inputs: dict[str, Array]
    _model: str
    _batches: bool
    _scattered: dict[str, list[Shape]]

    @classmethod
    def collect(cls, streams: list[ResponseStream], signature: Signature, config: Any) -> Batch:
        """Concatenate the inputs of one or more requests that are compatible according to `Signature.batches_with`.

        `config`: `ModelConfig` message. Raises `InvalidArgument` for tensors that cannot be concatenated.
        """
        requests = [stream.request.inputs for stream in streams]
        batches = signature.max_batch_size > 0
        if len(streams) > 1 and not batches:
            raise InvalidArgument(
                f"model '{signature.model}' does not batch, got {len(streams)} requests at once"
            )
        inputs: dict[str, Array] = {}
        for name, tensor in requests[0].items():
            arrays = (
                [tensor.array]
                if len(streams) == 1
                else [_array(name, tensors, signature.model) for tensors in requests]
            )
            inputs[name] = _concatenate(name, arrays, name in signature.ragged, signature.model)
        for spec in config.batch_input:
            (source,) = spec.source_input
            shapes = [_array(source, tensors, signature.model).shape for tensors in requests]
            for name in spec.target_name:
                inputs[name] = make_batch_input(spec, shapes)
        return cls(
            streams,
            [_rows(stream, signature) for stream in streams],
            inputs,
            signature.model,
            batches,
            {
                name: shapes
                for spec in config.batch_output
                for name, shapes in _scattered(spec, requests, signature)
            },
        )

    @property
    def size(self) -> int:
        """Total batch size."""
        return sum(self.rows)

    def scatter(self, outputs: dict[str, Array]) -> list[list[Tensor]]:
        """Split the outputs of the execution into views: one list of tensors per request, in the order of `streams`.

        Outputs have one row per input row; outputs in `batch_output` are split by the shapes of their source input.
        Strings can be str or bytes. Raises `InternalError` for outputs of unexpected size.
        """
        parts: list[list[Tensor]] = [[] for _ in self.streams]
        for name, array in outputs.items():
            whole = Tensor.from_numpy(name, array)
            for tensors, part in zip(parts, self._split(name, whole.array), strict=True):
                tensors.append(Tensor(name, whole.datatype, part))
        return parts

    def _split(self, name: str, array: Array) -> list[Array]:
        shapes = self._scattered.get(name)
        if shapes is not None:
            return self._scatter(name, array, shapes)
        if not self._batches:
            return [array]
        if array.ndim == 0 or array.shape[0] != self.size:
            raise InternalError(
                f"output '{name}' of model '{self._model}' has shape {list(array.shape)}, expected the batch size "
                f"{self.size} as first dimension"
            )
        if len(self.rows) == 1:
            return [array]
        ends = np.cumsum(self.rows).tolist()
        return [array[end - rows : end] for rows, end in zip(self.rows, ends, strict=True)]

    def _scatter(self, name: str, array: Array, shapes: list[Shape]) -> list[Array]:
        counts = [element_count(shape) for shape in shapes]
        if array.size != sum(counts):
            raise InternalError(
                f"output '{name}' of model '{self._model}' has {array.size} elements, its batch_output is made of "
                f"shapes {[list(shape) for shape in shapes]}, which have {sum(counts)}"
            )
        flat, parts, start = array.reshape(-1), [], 0
        for shape, count in zip(shapes, counts, strict=True):
            parts.append(flat[start : start + count].reshape(shape))
            start += count
        return parts


def _rows(stream: ResponseStream, signature: Signature) -> int:
    if signature.max_batch_size:
        for tensor in stream.request.inputs.values():
            return tensor.shape[0]
    return stream.batch_size


def _array(name: str, tensors: dict[str, Tensor], model: str) -> Array:
    if name not in tensors:
        raise InvalidArgument(f"a request to model '{model}' has no input '{name}', which its batch needs")
    return tensors[name].array


def _concatenate(name: str, arrays: list[Array], ragged: bool, model: str) -> Array:
    if ragged:
        arrays = [array.reshape(-1) for array in arrays]
    if len(arrays) == 1:
        return arrays[0]
    first = arrays[0].shape[1:]
    for array in arrays:
        if array.shape[1:] != first:
            raise InvalidArgument(
                f"inputs '{name}' of shapes {list(arrays[0].shape)} and {list(array.shape)} make no batch of model "
                f"'{model}'"
            )
    return np.concatenate(arrays)


def _scattered(
    spec: Any, requests: list[dict[str, Tensor]], signature: Signature
) -> list[tuple[str, list[Shape]]]:
    """Return the output shapes of each request. Variable dimensions have the size of the source input's dimension."""
    (source,) = spec.source_input
    result = []
    for name in spec.target_name:
        output = signature.outputs[name]
        dims = output.dims if output.reshape is None else output.reshape
        if signature.max_batch_size:
            dims = (-1, *dims)
        shapes = []
        for tensors in requests:
            given = _array(source, tensors, signature.model).shape
            try:
                shapes.append(
                    tuple(given[axis] if extent == -1 else extent for axis, extent in enumerate(dims))
                )
            except IndexError:
                raise InvalidArgument(
                    f"batch output '{name}' of model '{signature.model}' has more dimensions than its source input "
                    f"'{source}', which has shape {list(given)}"
                ) from None
        result.append((name, shapes))
    return result
