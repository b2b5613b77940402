"""Values as the tensors that a model declares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from neso.generation import InvalidParameter
from neso.server.signature import Signature, TensorSpec
from neso.server.tensor import DataType, Tensor

Value = str | bool | int | float


class InputTensors:
    """The inputs of one request, in the types and shapes that the model's configuration declares."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self.tensors: dict[str, Tensor] = {}

    def declared(self, names: Sequence[str], kind: type) -> TensorSpec | None:
        """The first of `names` that the model declares for `kind`: `str`, `bool` or `float` for any number."""
        for name in names:
            spec = self._signature.inputs.get(name)
            if spec is not None and kind_of(spec) is kind:
                return spec
        return None

    def put(self, spec: TensorSpec, values: Sequence[Value], field: str) -> None:
        """Add an input. Raises `InvalidParameter(field, …)` for what does not fit it."""
        shape = _shape(spec, len(values), field)
        if self._signature.max_batch_size:
            shape = (1, *shape)
        array = _array(spec, values, field)
        self.tensors[spec.name] = Tensor(spec.name, spec.datatype, array.reshape(shape))


def kind_of(spec: TensorSpec) -> type:
    """What one element of a tensor is: `str`, `bool` or `float` for any number."""
    return {DataType.BYTES: str, DataType.BOOL: bool}.get(spec.datatype, float)


def _shape(spec: TensorSpec, count: int, field: str) -> tuple[int, ...]:
    """The last dimension that may vary takes the values, others that may are 1."""
    free = max((axis for axis, extent in enumerate(spec.dims) if extent == -1), default=None)
    shape = tuple(
        count if axis == free else 1 if extent == -1 else extent for axis, extent in enumerate(spec.dims)
    )
    if math.prod(shape) != count:
        raise InvalidParameter(
            field, f"the model's input '{spec.name}' takes {math.prod(shape)} of them, got {count}"
        )
    return shape


def _array(spec: TensorSpec, values: Sequence[Value], field: str) -> np.ndarray:
    if spec.datatype is DataType.BYTES:
        texts = np.empty(len(values), np.object_)
        texts[:] = [str(value).encode() for value in values]
        return texts
    dtype = spec.datatype.dtype
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        for value in values:
            if not isinstance(value, bool | int) and not value.is_integer():  # type: ignore[union-attr]
                raise InvalidParameter(field, f"the model takes whole numbers only, got {value}")
            if not limits.min <= int(value) <= limits.max:
                raise InvalidParameter(field, f"the model takes {limits.min} to {limits.max}, got {value}")
    return np.array(values).astype(dtype)
