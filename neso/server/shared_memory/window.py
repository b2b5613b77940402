"""The part of a shared memory region that holds one tensor of a request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from neso.server.datatypes import DataType
from neso.server.errors import InternalError
from neso.server.tensor import Tensor

REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
BYTE_SIZE = "shared_memory_byte_size"


class Region(Protocol):
    """Memory of a client, on the host or on a GPU."""

    @property
    def name(self) -> str: ...

    def check(self, offset: int, byte_size: int) -> None: ...

    def read(self, offset: int, byte_size: int) -> memoryview: ...

    def write(self, offset: int, data: bytes | memoryview) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemoryWindow:
    """`byte_size` bytes from `offset` of a region, which stays mapped as long as the window lives."""

    region: Region
    offset: int
    byte_size: int

    def read(self, name: str, datatype: DataType, shape: tuple[int, ...]) -> Tensor:
        """The tensor in it, in the binary tensor format. Raises `InvalidArgument` when the sizes disagree.

        Fixed-size types are read-only views of the region, if it is on the host. A client that writes into it
        while the request is in flight changes what the model sees.
        """
        data = self.region.read(self.offset, self.byte_size)
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
        if tensor.datatype is DataType.BYTES:
            self.region.write(self.offset, tensor.to_wire())
        else:
            elements = np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8)
            self.region.write(self.offset, elements.data)
        return size

    def parameters(self, written: int) -> dict[str, str | int]:
        """What a response says of an output of `written` bytes that went here."""
        return {REGION: self.region.name, OFFSET: self.offset, BYTE_SIZE: written}
