"""Allocators that a program gives for the memory of outputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from inspect import signature

import numpy as np

from neso.compat.tritonserver.enums import DataType
from neso.compat.tritonserver.tensor import Tensor, copy_into
from neso.server.inprocess.tensor import MemoryBuffer, MemoryType


class MemoryAllocator(ABC):
    """Gives the memory that an output is copied to. It need not be of the kind that was asked for."""

    @abstractmethod
    def allocate(
        self, size: int, memory_type: MemoryType, memory_type_id: int, tensor_name: str = ""
    ) -> MemoryBuffer:
        """A buffer of at least `size` bytes. Some releases of Triton give no name, so it may be left out."""


class NumpyAllocator(MemoryAllocator):
    """Memory of numpy arrays."""

    def allocate(
        self, size: int, memory_type: MemoryType, memory_type_id: int, tensor_name: str = ""
    ) -> MemoryBuffer:
        return MemoryBuffer.from_dlpack(np.empty(size, np.uint8))


default_memory_allocators: dict[MemoryType, MemoryAllocator] = {MemoryType.CPU: NumpyAllocator()}


def allocated(allocator: MemoryAllocator, name: str, tensor: Tensor) -> Tensor:
    """A copy of a tensor in memory of an allocator. Raises `TritonError` where that does not do."""
    wanted = (tensor.size, tensor.memory_type, tensor.memory_type_id)
    try:
        signature(allocator.allocate).bind(*wanted, name)
    except TypeError:
        buffer = allocator.allocate(*wanted)
    else:
        buffer = allocator.allocate(*wanted, name)
    copy_into(tensor, buffer)
    if tensor.data_type is DataType.BYTES:
        return tensor  # its elements are Python objects; the buffer has their binary form
    return Tensor(tensor.data_type, tensor.shape, replace(buffer, size=tensor.size))
