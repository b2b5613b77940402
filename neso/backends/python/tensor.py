"""`pb_utils.Tensor`: a named numpy array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from neso.backends.python import dlpack
from neso.backends.python.datatypes import numpy_to_triton_type
from neso.backends.python.errors import TritonModelException
from neso.server.errors import InvalidArgument
from neso.server.tensor import DataType
from neso.server.tensor import Tensor as ServerTensor


class Tensor:
    """An input or output tensor. BYTES tensors are arrays of objects, `bytes` when they come from a client."""

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str, array: npt.NDArray[Any]) -> None:
        if not isinstance(array, np.ndarray):
            raise TritonModelException(
                f"Tensor '{name}' must be made from a numpy array, got {type(array).__name__}"
            )
        self._name = name
        self._array = array
        datatype = _DATATYPES.get(array.dtype)
        self._datatype = _datatype_of(name, array) if datatype is None else datatype

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> npt.NDArray[Any]:
        """The elements. Arrays that view a client's message are copied once: models may write into theirs."""
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def triton_dtype(self) -> int:
        """The number of the datatype in model configurations."""
        return numpy_to_triton_type(self._datatype.dtype.type)

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """True: tensors of the server are in the memory of the CPU."""
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule that shares the memory."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """From a capsule, or an object with `__dlpack__`; shares the memory of CPU tensors."""
        try:
            return Tensor(name, dlpack.load(tensor))
        except (RuntimeError, BufferError, TypeError, ValueError) as error:
            raise TritonModelException(f"Tensor '{name}' cannot be made from DLPack: {error}") from None

    def __dlpack__(self, **options: Any) -> Any:
        """A DLPack capsule that shares the memory; not for BYTES, for which it raises `TritonModelException`."""
        if self._datatype is DataType.BYTES:
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.export(self.as_numpy(), **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    @classmethod
    def from_server(cls, tensor: ServerTensor) -> Tensor:
        """Wrap a tensor of a request."""
        wrapped = cls.__new__(cls)
        wrapped._name, wrapped._datatype, wrapped._array = tensor.name, tensor.datatype, tensor.array
        return wrapped

    def to_server(self) -> ServerTensor:
        """As a tensor of a response. Elements of object arrays that are not `bytes` become text."""
        array = self._array
        if self._datatype is not DataType.BYTES:
            if array.flags.c_contiguous and array.dtype.isnative:
                return ServerTensor(self._name, self._datatype, array)
            return ServerTensor.from_numpy(self._name, array)
        elements = np.empty(self._array.shape, np.object_)
        flat = elements.reshape(-1)
        for i, element in enumerate(self._array.flat):
            flat[i] = element if isinstance(element, bytes) else str(element).encode()
        return ServerTensor(self._name, DataType.BYTES, elements)


# Of the arrays that models make: finding out takes longer than all else that a Tensor does.
_DATATYPES: dict[np.dtype[Any], DataType] = {}


def _datatype_of(name: str, array: npt.NDArray[Any]) -> DataType:
    try:
        datatype = DataType.of_numpy(array.dtype)
    except InvalidArgument as error:
        raise TritonModelException(f"Tensor '{name}': {error.message}") from None
    if len(_DATATYPES) < 256:  # text has a dtype for each length
        _DATATYPES[array.dtype] = datatype
    return datatype
