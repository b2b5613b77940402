"""A response that is kept, in memory or as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from neso.server.datatypes import DataType
from neso.server.inference_request import ParameterValue
from neso.server.tensor import Tensor

OVERHEAD = 256
"""Bytes that an entry, and each of its tensors, takes besides the data. An estimate."""

FORMAT = "1"
"""Of `CachedResponse.encode`. Part of the keys of what is stored: another one is not found."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedResponse:
    """The outputs of a response, and its parameters. What is cached must not be written to."""

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, ParameterValue]

    @classmethod
    def copy_of(cls, outputs: Iterable[Tensor], parameters: Mapping[str, ParameterValue]) -> CachedResponse:
        """With data of its own: the tensors may be views of a buffer that is used again."""
        return cls(tuple(_copy(tensor) for tensor in outputs), dict(parameters))

    def copy_outputs(self) -> list[Tensor]:
        """For a client, who may write to them."""
        return [_copy(tensor) for tensor in self.outputs]

    @property
    def byte_size(self) -> int:
        """What it takes of the cache's capacity."""
        return OVERHEAD + sum(OVERHEAD + tensor.byte_size for tensor in self.outputs)

    def encode(self) -> bytes:
        """As MessagePack, with tensors in the binary tensor format."""
        outputs = [
            _StoredTensor(tensor.name, tensor.datatype.value, tensor.shape, tensor.to_wire())
            for tensor in self.outputs
        ]
        return _encoder.encode(_StoredResponse(outputs, dict(self.parameters)))

    @classmethod
    def decode(cls, data: bytes) -> CachedResponse:
        """What `encode` wrote. Raises `msgspec.DecodeError` or `InvalidArgument` for anything else."""
        stored = _decoder.decode(data)
        outputs = [
            Tensor.from_wire(
                tensor.name, DataType.parse(tensor.datatype, tensor.name), tensor.shape, tensor.data
            )
            for tensor in stored.outputs
        ]
        return cls(tuple(outputs), stored.parameters)


class _StoredTensor(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class _StoredResponse(msgspec.Struct, array_like=True):
    outputs: list[_StoredTensor]
    parameters: dict[str, ParameterValue]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_StoredResponse)


def _copy(tensor: Tensor) -> Tensor:
    return Tensor(tensor.name, tensor.datatype, tensor.array.copy())
