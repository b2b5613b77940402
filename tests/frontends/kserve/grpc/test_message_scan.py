"""The native scan of infer requests, compared with protobuf's verdict."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from neso import _wire
from neso.frontends.kserve.grpc_codec import decode_infer_message, decode_load_request, scan_infer_message
from neso.frontends.kserve.request_limits import RequestLimits
from neso.server.errors import InvalidArgument

ANY = 2**62


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


varints = st.one_of(
    st.integers(0, 300).map(varint),
    st.integers(0, 2**64 - 1).map(varint),
    st.binary(min_size=1, max_size=12),
    st.integers(1, 12).map(lambda size: b"\xff" * size),
    st.integers(0, 9).map(lambda size: b"\x80" * size + b"\x01"),  # not the shortest form
)
numbers = st.one_of(st.integers(0, 9), st.sampled_from([15, 16, 2**29 - 1, 2**29]))


@st.composite
def fields(draw: st.DrawFn, content: st.SearchStrategy[bytes]) -> bytes:
    """A field of any wire type; of length-delimited ones the length may be wrong."""
    number, wire_type = draw(numbers), draw(st.sampled_from([0, 1, 2, 2, 2, 2, 3, 4, 5, 6, 7]))
    tag = varint(number << 3 | wire_type)
    if wire_type == 2:
        data = draw(content)
        size = draw(st.sampled_from([len(data)] * 8 + [len(data) + 1, max(len(data) - 1, 0), 2**31, 2**63]))
        return tag + varint(size) + data
    if wire_type == 0:
        return tag + draw(varints)
    if wire_type == 3 and draw(st.booleans()):
        return tag + draw(content) + varint(number << 3 | 4)
    return tag + draw(st.binary(max_size=8)) + bytes({1: 8, 5: 4}.get(wire_type, 0))


messages = st.recursive(
    st.binary(max_size=12) | varints,
    lambda content: st.lists(fields(content), max_size=4).map(b"".join),
    max_leaves=25,
)


def parsed(data: bytes) -> pb.ModelInferRequest | None:
    try:
        return pb.ModelInferRequest.FromString(data)
    except DecodeError:
        return None


@settings(max_examples=2000, deadline=None)
@given(messages)
@example(b"\x3b" * 200)
@example(b"\x0b" * 99 + b"\x0c" * 99)
@example(b"\xba\x80\x00\x01x")  # field 7 with a tag that is not in its shortest form
@example(b"\xba\x80\x80\x80\x80\x00\x01x")
def test_scan_accepts_what_protobuf_accepts(data):
    expected = parsed(data)
    try:
        values, rest, raw = _wire.split_infer_request(data, ANY, ANY)
        assert values == _wire.scan_infer_request(data, ANY, ANY)
    except ValueError:
        assert expected is None
        return
    got = parsed(rest)
    assert (got is None) == (expected is None)
    if got is not None and expected is not None:
        assert raw == list(expected.raw_input_contents)
        assert not got.raw_input_contents
        got.raw_input_contents.extend(raw)
        assert got == expected


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30))
def test_counts(inputs, parameters, elements, strings):
    message = pb.ModelInferRequest(model_name="m")
    for i in range(inputs):
        tensor = message.inputs.add(name=f"{i}", shape=[1, 300])
        for j in range(parameters):
            tensor.parameters[f"{j}"].int64_param = 1
        tensor.contents.int64_contents.extend(range(elements))
        tensor.contents.fp32_contents.extend([1.0] * elements)
        tensor.contents.bytes_contents.extend([b"x"] * strings)
    data = message.SerializeToString()
    packed = 2 * bool(elements)
    each = 1 + 1 + 1 + 2 + parameters * 4 + 1 + packed + 2 * elements + strings
    values, nested = 1 + inputs * each, inputs * (1 + 1 + 2 * parameters)
    assert _wire.scan_infer_request(data, nested, values) == values
    with pytest.raises(OverflowError, match="fields and elements"):
        _wire.scan_infer_request(data, nested, values - 1)
    if nested:
        with pytest.raises(OverflowError, match="tensors and parameters"):
            _wire.scan_infer_request(data, nested - 1, values)


@pytest.mark.parametrize("size", [5, 548, 65 << 10, 1 << 20])
def test_long_varints(size):
    with pytest.raises(InvalidArgument, match="malformed ModelInferRequest"):
        decode_infer_message(*scan_infer_message(b"\xff" * size, RequestLimits())[1:])


@pytest.mark.parametrize("small", [False, True])
def test_limits_name_the_option_that_raises_them(small):
    message = pb.ModelInferRequest()
    message.inputs.add().contents.int64_contents.extend([1] * (1001 if small else 100_000))
    with pytest.raises(
        InvalidArgument, match=r"too many fields and elements: the limits are .* 1000 elements"
    ):
        scan_infer_message(message.SerializeToString(), RequestLimits(values=1000))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 20))
def test_messages_have_no_more_values_than_bytes(elements, parameters):
    message = pb.ModelInferRequest()
    message.inputs.add(shape=elements).contents.bool_contents.extend([True] * len(elements))
    for index in range(parameters):
        message.parameters[str(index)].bool_param = True
    data = message.SerializeToString()
    assert _wire.scan_infer_request(data, len(data) // 2, len(data)) <= len(data)


def test_large_messages_are_split():
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"a" * 70_000, b"", b"b" * 70_000])
    message.inputs.add(name="IN", shape=[3])
    scanned = scan_infer_message(message.SerializeToString(), RequestLimits(values=1000))
    assert len(scanned.data) < 100
    infer = decode_infer_message(scanned.data, scanned.raw_inputs)
    assert list(infer.raw_inputs) == list(message.raw_input_contents)
    assert infer.request.inputs == message.inputs


@settings(max_examples=300, deadline=None)
@given(messages)
def test_load_requests(data):
    try:
        expected = pb.RepositoryModelLoadRequest.FromString(data)
    except DecodeError:
        expected = None
    try:
        assert decode_load_request(data) == expected
    except InvalidArgument:
        assert expected is None
