"""Tensors as a Python program likes them, and what it may give in their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.datatypes import DataType
from neso.server.errors import InvalidArgument
from neso.server.tensor import Tensor as ServerTensor


class Tensor:
    """An output. `numpy.asarray(tensor)` and DLPack (`torch.from_dlpack(tensor)`) share its memory."""

    def __init__(self, tensor: ServerTensor) -> None:
        self._tensor = tensor

    @property
    def name(self) -> str:
        return self._tensor.name

    @property
    def datatype(self) -> DataType:
        return self._tensor.datatype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shape

    def numpy(self) -> npt.NDArray[Any]:
        """The elements; those of BYTES tensors are `bytes` objects."""
        return self._tensor.array

    def to_string_array(self) -> npt.NDArray[np.object_]:
        """The elements of a BYTES tensor as text. Raises `InvalidArgument` for other tensors."""
        self._need_bytes()
        texts = np.empty(self.shape, np.object_)
        texts.reshape(-1)[:] = self._tensor.strings()
        return texts

    def to_bytes_array(self) -> npt.NDArray[np.object_]:
        """The elements of a BYTES tensor. Raises `InvalidArgument` for other tensors."""
        self._need_bytes()
        return self._tensor.array

    def to_server(self) -> ServerTensor:
        """The tensor as the core knows it."""
        return self._tensor

    def _need_bytes(self) -> None:
        if self.datatype is not DataType.BYTES:
            raise InvalidArgument(f"tensor '{self.name}' is {self.datatype.value}, not BYTES")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._tensor.array, dtype=dtype, copy=copy)

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self._tensor.array.__dlpack_device__()

    def __repr__(self) -> str:
        return f"Tensor({self.name!r}, {self.datatype.value}, {self.numpy()!r})"


def make_input(name: str, value: Any, datatype: DataType | None) -> ServerTensor:
    """A tensor from an array, a DLPack object, a list or a scalar.

    Lists and scalars become the model's `datatype`, arrays keep theirs. Raises `InvalidArgument`.
    """
    if isinstance(value, Tensor):
        value = value.to_server()
    if isinstance(value, ServerTensor):
        return ServerTensor(name, value.datatype, value.array)
    if isinstance(value, np.ndarray | np.generic):
        return ServerTensor.from_numpy(name, value)
    if hasattr(value, "__dlpack__"):
        try:
            return ServerTensor.from_numpy(name, np.from_dlpack(value))
        except (RuntimeError, BufferError, TypeError) as error:
            raise InvalidArgument(f"input '{name}' cannot be read through DLPack: {error}") from None
    return _from_plain(name, value, datatype)


def _from_plain(name: str, value: Any, datatype: DataType | None) -> ServerTensor:
    if isinstance(value, str | bytes):
        value = np.array(value, np.object_)
    try:
        if datatype is DataType.BYTES:
            return ServerTensor.from_numpy(name, np.array(value, np.object_))
        natural = np.asarray(value)
        if datatype is None or natural.dtype.kind in "SUO":
            return ServerTensor.from_numpy(name, natural)
        if natural.size and not _fits(natural.dtype, datatype.dtype):
            raise InvalidArgument(
                f"input '{name}' is {datatype.value}, a list of {natural.dtype} does not convert to that"
            )
        return ServerTensor(name, datatype, np.asarray(value, datatype.dtype))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"input '{name}' cannot be made into a tensor: {error}") from None


def _fits(given: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    if given.kind in "iu":
        return wanted.kind != "b"
    if given.kind == "f":
        return wanted.kind in "fV"  # ml_dtypes' bfloat16 is of kind V
    return given == wanted
