"""The LRU cache of responses, and the hash of requests."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neso.server.errors import InvalidArgument
from neso.server.response_cache.cache import OVERHEAD, CachedResponse, LocalCache, request_key
from neso.server.tensor import DataType, Tensor


def response(size: int) -> CachedResponse:
    """Return a response with one output of this many bytes."""
    return CachedResponse.copy_of([Tensor.from_numpy("OUT", np.zeros(size, np.uint8))], {})


STEPS = st.lists(
    st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 6), st.integers(0, 2000)), max_size=60
)


@given(st.integers(0, 6000), STEPS)
def test_lru_eviction_by_bytes(capacity, steps):
    cache, model = LocalCache(capacity), OrderedDict()
    for what, number, size in steps:
        key = bytes([number])
        if what == "get":
            assert cache.get(key) is model.get(key)
            if key in model:
                model.move_to_end(key)
            continue
        new = response(size)
        fits = new.byte_size <= capacity
        assert cache.put(key, new) == fits
        if fits:
            model.pop(key, None)
            model[key] = new
            while sum(kept.byte_size for kept in model.values()) > capacity:
                model.popitem(last=False)
        assert cache.byte_size == sum(kept.byte_size for kept in model.values()) <= capacity
        assert len(cache) == len(model)


def test_sizes_equal_the_data():
    assert response(1000).byte_size == 1000 + 2 * OVERHEAD
    text = Tensor.from_strings("OUT", ["abc", ""])
    assert CachedResponse.copy_of([text], {}).byte_size == 11 + 2 * OVERHEAD


def test_cached_responses_own_their_data():
    array = np.zeros(2, np.float32)
    kept = CachedResponse.copy_of([Tensor.from_numpy("OUT", array)], {})
    array[:] = 1
    given_out = kept.copy_outputs()[0].array
    assert given_out.tolist() == [0, 0]
    given_out[:] = 2
    assert kept.copy_outputs()[0].array.tolist() == [0, 0]


TEXT = st.text(max_size=3)
TENSORS = st.one_of(
    st.builds(
        lambda kind, values: Tensor.from_numpy("", np.array(values, kind)),
        st.sampled_from(["u1", "i1", "?", "i2", "f4", "f2"]),
        st.lists(st.integers(0, 1), max_size=4),
    ),
    st.builds(
        lambda elements: Tensor.from_numpy("", np.array([*elements, b"x"], np.object_)),
        st.lists(st.binary(max_size=3), max_size=3),
    ),
    st.builds(lambda n: Tensor.from_numpy("", np.zeros((n, 2 - n), np.uint8)), st.integers(0, 2)),
)
REQUESTS = st.tuples(
    st.lists(TEXT, max_size=2),
    st.dictionaries(TEXT, TENSORS, max_size=2),
    st.sets(TEXT, max_size=2),
    st.dictionaries(TEXT, st.one_of(st.booleans(), st.integers(0, 1), TEXT), max_size=2),
)


def plain(request) -> object:
    """Return the whole request in comparable form."""
    scope, inputs, outputs, parameters = request
    tensors = {n: (t.datatype, t.shape, t.to_wire()) for n, t in inputs.items()}
    return scope, tensors, outputs, {n: (type(v), v) for n, v in parameters.items()}


@given(REQUESTS, REQUESTS)
def test_equal_requests_have_equal_keys(one, other):
    assert (request_key(*one) == request_key(*other)) == (plain(one) == plain(other))
    scope, inputs, outputs, parameters = one
    turned = (scope, dict(reversed(inputs.items())), [*outputs], dict(reversed(parameters.items())))
    assert request_key(*one) == request_key(*turned)


@pytest.mark.parametrize("kind", list(DataType))
def test_keys_of_every_datatype(kind):
    keys = set()
    for shape in [(), (0,), (1,), (2, 3)]:
        array = np.full(shape, b"a", np.object_) if kind is DataType.BYTES else np.ones(shape, kind.dtype)
        keys.add(request_key(["m"], {"IN": Tensor("IN", kind, array)}, (), {}))
    assert len(keys) == 4


def test_keys_do_not_depend_on_the_memory_layout():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    turned = Tensor("IN", DataType.INT32, np.asfortranarray(array))
    plain = Tensor("IN", DataType.INT32, array)
    assert request_key([], {"IN": turned}, (), {}) == request_key([], {"IN": plain}, (), {})


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
