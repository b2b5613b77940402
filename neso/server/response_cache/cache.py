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
    """Return a hash of everything that a response depends on, independent of order. `scope` identifies the model."""
    digest = hashlib.blake2b(digest_size=32)

    def add(*parts: str | bytes | memoryview) -> None:
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            # Length-prefixed, so that ("ab", "c") and ("a", "bc") differ.
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
    """Return the data in the binary tensor format, without a copy if possible."""
    array = tensor.array
    if array.dtype.kind in "biuf" and array.flags.c_contiguous and array.ndim and array.size:
        return array.data.cast("B")
    return tensor.to_wire()


OVERHEAD = 256
"""Estimated overhead of an entry and of each of its tensors, in bytes."""

FORMAT = "1"
"""Version of `CachedResponse.encode`. Part of the keys in Redis, so that entries of other versions are misses."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedResponse:
    """Outputs and parameters of a response. The arrays must not be modified."""

    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, ParameterValue]

    @classmethod
    def copy_of(cls, outputs: Iterable[Tensor], parameters: Mapping[str, ParameterValue]) -> CachedResponse:
        """Create from copies of the tensors, which can be views of a reused buffer."""
        return cls(tuple(_copy(tensor) for tensor in outputs), dict(parameters))

    def copy_outputs(self) -> list[Tensor]:
        """Return copies of the outputs, which the client can modify."""
        return [_copy(tensor) for tensor in self.outputs]

    @property
    def byte_size(self) -> int:
        """Size in the cache, in bytes."""
        return OVERHEAD + sum(OVERHEAD + tensor.byte_size for tensor in self.outputs)

    def encode(self) -> bytes:
        """Encode as MessagePack, with tensors in the binary tensor format."""
        outputs = [
            _StoredTensor(tensor.name, tensor.datatype.value, tensor.shape, tensor.to_wire())
            for tensor in self.outputs
        ]
        return _encoder.encode(_StoredResponse(outputs, dict(self.parameters)))

    @classmethod
    def decode(cls, data: bytes) -> CachedResponse:
        """Decode the result of `encode`. Raises `msgspec.DecodeError` or `InvalidArgument` for other data."""
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
    """An LRU cache whose capacity is in bytes. Not thread-safe; used on the core's loop."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.byte_size = 0
        self._entries: OrderedDict[Key, CachedResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    async def close(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self.byte_size = 0

    def get(self, key: Key) -> CachedResponse | None:
        """Return the response for a key; None if it is not in the cache."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, response: CachedResponse) -> bool:
        """Store a response. Returns False if it is larger than the cache."""
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
