"""Serialization of responses."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from neso.server.errors import InvalidArgument
from neso.server.response_cache.cache import CachedResponse
from neso.server.tensor import DataType, Tensor


@pytest.mark.parametrize("kind", list(DataType))
def test_round_trip_of_every_datatype(kind):
    for shape in [(), (0,), (1,), (2, 3)]:
        array = (
            np.full(shape, "ü".encode(), np.object_) if kind is DataType.BYTES else np.ones(shape, kind.dtype)
        )
        parameters = {"a": True, "b": 2**62, "c": 0.5, "d": "text"}
        kept = CachedResponse((Tensor("OUT", kind, array),), parameters)
        read = CachedResponse.decode(kept.encode())
        (tensor,) = read.outputs
        assert (tensor.name, tensor.datatype, tensor.shape) == ("OUT", kind, shape)
        assert tensor.array.dtype == array.dtype and tensor.array.tolist() == array.tolist()
        assert read.parameters == parameters
        assert [type(value) for value in read.parameters.values()] == [bool, int, float, str]


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"nonsense", msgspec.msgpack.encode([[["OUT", "FP32", [3], b"1234"]], {}])]
)
def test_invalid_stored_responses(data):
    with pytest.raises((msgspec.DecodeError, InvalidArgument)):
        CachedResponse.decode(data)
