"""The part of a shared memory region that holds one tensor of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from neso.server.datatypes import DataType
from neso.server.errors import InternalError
from neso.server.shared_memory.region import SharedMemoryRegion
from neso.server.tensor import Tensor

REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemoryWindow:
    """`byte_size` bytes from `offset` of a region, which stays mapped as long as the window lives."""

    region: SharedMemoryRegion
    offset: int
    byte_size: int

    def read(self, name: str, datatype: DataType, shape: tuple[int, ...]) -> Tensor:
        """The tensor in it, in the binary tensor format. Raises `InvalidArgument` when the sizes disagree.

        Fixed-size types are read-only views of the region. A client that writes into it while the request is
        in flight changes what the model sees.
        """
        data = self.region.view(self.offset, self.byte_size).toreadonly()
        tensor = Tensor.from_wire(name, datatype, shape, data)
        if tensor.array.flags.aligned:
            return tensor
        return replace(tensor, array=tensor.array.copy())  # there are backends that cannot read it in place

    def write(self, tensor: Tensor) -> int:
        """Put a tensor into it; the bytes that this took. Raises `InternalError` if it is too small."""
        size = tensor.byte_size
        if size > self.byte_size:
            raise InternalError(
                f"shared memory size specified with the request for output '{tensor.name}' ({self.byte_size} bytes) "
                f"should be at least {size} bytes to hold the results"
            )
        view = self.region.view(self.offset, size)
        if tensor.datatype is DataType.BYTES:
            view[:] = tensor.to_wire()
        else:
            target = np.frombuffer(view, np.uint8)
            target[:] = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
        return size

    def parameters(self, written: int) -> dict[str, str | int]:
        """What a response says of an output of `written` bytes that went here."""
        return {REGION: self.region.name, OFFSET: self.offset, BYTE_SIZE: written}
