"""Triton's tensor: Neso's with Triton's constructor and attributes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from neso.compat.tritonserver.enums import DataType
from neso.server.errors import InvalidArgument, Unsupported
from neso.server.inprocess.tensor import MemoryBuffer, MemoryType
from neso.server.inprocess.tensor import Tensor as NesoTensor
from neso.server.tensor import Tensor as ServerTensor


class Tensor(NesoTensor):
    """A tensor over a memory buffer. Raises `InvalidArgumentError` where the sizes disagree.

    The memory of a BYTES tensor is read once, in the binary tensor format.
    """

    __slots__ = ()

    def __init__(self, data_type: DataType, shape: Sequence[int], memory_buffer: MemoryBuffer) -> None:
        if memory_buffer.memory_type is MemoryType.GPU:
            raise Unsupported("a tensor on a GPU is made by Tensor.from_dlpack(), not over a MemoryBuffer")
        data = np.asarray(_HostMemory(memory_buffer))
        datatype, shape = data_type.neso, tuple(int(extent) for extent in shape)
        super().__init__(ServerTensor.from_wire("", datatype, shape, data.data))

    @classmethod
    def of(cls, tensor: ServerTensor) -> Tensor:
        """From the core's tensor."""
        return cls._wrap(tensor)

    @property
    def data_type(self) -> DataType:
        return DataType[self.datatype.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return super().shape

    @shape.setter
    def shape(self, shape: Sequence[int]) -> None:
        """Another shape of the same memory; views that were taken before keep theirs."""
        try:
            if self._host is None:
                self._gpu = self._gpu.reshape(tuple(shape))
            else:
                array = self._host.array.reshape(tuple(shape))
                self._host = ServerTensor(self._host.name, self._host.datatype, array)
        except (ValueError, RuntimeError, TypeError):
            raise InvalidArgument(f"a tensor of shape {self.shape} cannot take shape {shape}") from None

    def __repr__(self) -> str:
        return f"Tensor(data_type={self.data_type!r}, shape={self.shape}, memory_buffer={self.memory_buffer})"


class _HostMemory:
    """Lets numpy look at a buffer, and holds its owner meanwhile."""

    def __init__(self, buffer: MemoryBuffer) -> None:
        self._buffer = buffer
        self.__array_interface__: dict[str, Any] = {
            "data": (buffer.data_ptr, False),
            "shape": (buffer.size,),
            "typestr": "|u1",
            "version": 3,
        }


def copy_into(tensor: NesoTensor, buffer: MemoryBuffer) -> None:
    """Copy a tensor's memory into a buffer on the host. Raises `ServerError` where it does not fit."""
    source = tensor.memory_buffer
    if buffer.memory_type is MemoryType.GPU or source.memory_type is MemoryType.GPU:
        raise Unsupported("memory allocators must give memory on the host")
    if buffer.size < source.size:
        raise InvalidArgument(f"the memory allocator gave {buffer.size} bytes of {source.size}")
    ctypes.memmove(buffer.data_ptr, source.data_ptr, source.size)
