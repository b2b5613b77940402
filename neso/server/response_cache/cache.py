"""Response cache: keys, cached responses and the in-memory LRU cache."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from neso.server.inference_request import ParameterValue
from neso.server.tensor import DataType, Tensor

Key = bytes


def request_key(
    scope: Iterable[str],
    inputs: Mapping[str, Tensor],
    requested_outputs: Iterable[str],
    parameters: Mapping[str, ParameterValue],
) -> Key:
    """A hash of all that a response depends on. `scope` tells the models apart; no order matters but its own."""
    digest = hashlib.blake2b(digest_size=32)

    def add(*parts: str | bytes | memoryview) -> None:
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            # Each length goes before its part: ("ab", "c") and ("a", "bc") must differ.
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)

    for part in scope:
        add("scope", part)
    for name, tensor in sorted(inputs.items()):
        add("input", name, tensor.datatype.value, repr(tensor.shape), _wire(tensor))
    for name in sorted(set(requested_outputs)):
        add("output", name)
    for name, value in sorted(parameters.items()):
        add("parameter", name, type(value).__name__, repr(value))
    return digest.digest()


def _wire(tensor: Tensor) -> bytes | memoryview:
    """The data in the wire format, without a copy where memory holds it in that format."""
    array = tensor.array
    if array.dtype.kind in "biuf" and array.flags.c_contiguous and array.ndim and array.size:
        return array.data.cast("B")
    return tensor.to_wire()


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


class LocalCache:
    """Least recently used entries make room for new ones. Not thread-safe; belongs to the core's loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.byte_size = 0
        self._entries: OrderedDict[Key, CachedResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def close(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.byte_size = 0

    def get(self, key: Key) -> CachedResponse | None:
        """The response that was put under that key, None if there is none (any more)."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, response: CachedResponse) -> bool:
        """Keep a response, in place of one of that key; False if it is larger than the whole cache."""
        size = response.byte_size
        if size > self.capacity:
            return False
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self.byte_size -= replaced.byte_size
        while self.byte_size + size > self.capacity:
            _, oldest = self._entries.popitem(last=False)
            self.byte_size -= oldest.byte_size
        self._entries[key] = response
        self.byte_size += size
        return True
