"""Fast path of the infer parser (C++): equal results to Python, and used for requests of common clients."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso import _wire
from neso._wire import parse_plain_infer
from neso.frontends.kserve import http_codec
from neso.frontends.kserve.request_limits import RequestLimits
from neso.frontends.transport.http1 import Request
from neso.server.errors import ServerError
from neso.server.shared_memory.regions import SharedMemory
from neso.server.tensor import DataType

NUMBERS = ["FP32", "FP64", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16"]

_elements = st.one_of(
    st.integers(-(2**70), 2**70),
    st.integers(-200, 300),
    st.floats(),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -0.0, 1e400, 3.5e38, 3.4028235677973366e38, 5e-324, 1e-50]),
    st.booleans(),
    st.text(max_size=5),
    st.none(),
    st.lists(st.integers(0, 3), max_size=2),
)
_names = st.one_of(st.sampled_from(["A", "B", "ä"]), st.text(max_size=3), st.integers())
_inputs = st.fixed_dictionaries(
    {},
    optional={
        "name": _names,
        "datatype": st.sampled_from([*NUMBERS, "BOOL", "BYTES", "BF16", "NONE", 1]),
        "shape": st.one_of(
            st.lists(st.integers(0, 3), max_size=3),
            st.lists(st.one_of(st.integers(-1, 2**70), st.text(max_size=1))),
        ),
        "data": st.lists(_elements, max_size=6),
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_size", "other"]),
            st.one_of(st.integers(-1, 20), st.text()),
            max_size=2,
        ),
        "more": st.integers(),
    },
)
_outputs = st.fixed_dictionaries(
    {"name": _names},
    optional={
        "parameters": st.dictionaries(st.sampled_from(["binary_data", "classification"]), st.booleans())
    },
)
_documents = st.fixed_dictionaries(
    {"inputs": st.lists(_inputs, max_size=3)},
    optional={
        "id": st.one_of(st.text(max_size=4), st.integers()),
        "outputs": st.lists(_outputs, max_size=2),
        "parameters": st.dictionaries(
            st.sampled_from(["binary_data_output", "x"]), st.booleans(), max_size=2
        ),
    },
)


class Model:
    name = "m"


def read(body: bytes, *, plain: bool, header_length: int | None = None) -> Any:
    """Result of `read_infer_request` in comparable form."""
    headers = {}
    if header_length is not None:
        headers[b"inference-header-content-length"] = str(header_length).encode()
    request = Request("POST", b"/", b"", headers, body)
    parse = http_codec.parse_plain_infer
    if not plain:
        http_codec.parse_plain_infer = lambda text: None
    model: Any = Model()
    try:
        inference, output_format = http_codec.read_infer_request(
            request, model, "", SharedMemory(False), RequestLimits()
        )
    except ServerError as error:
        return error.message
    finally:
        http_codec.parse_plain_infer = parse
    tensors = [
        (name, t.datatype, t.array.dtype, t.array.shape, t.array.tolist(), t.array.flags.c_contiguous)
        for name, t in inference.inputs.items()
    ]
    return inference.id, repr(tensors), inference.requested_outputs, inference.parameters, output_format


@settings(max_examples=400, deadline=None)
@given(_documents, st.binary(max_size=20), st.booleans(), st.booleans(), st.booleans())
def test_fast_path_equals_python(
    document: dict[str, Any], binary: bytes, spaces: bool, ascii_only: bool, sort_keys: bool
) -> None:
    text = json.dumps(
        document,
        sort_keys=sort_keys,
        ensure_ascii=ascii_only,
        indent=1 if spaces else None,
        separators=None if spaces else (",", ":"),
    ).encode("utf-8", "surrogatepass")
    whole = text + binary
    assert read(whole, plain=True, header_length=len(text)) == read(
        whole, plain=False, header_length=len(text)
    )


@st.composite
def _nested(draw: st.DrawFn, shape: list[int], datatype: str) -> Any:
    """Lists that are nested as the shape, with a rare mistake."""
    if not shape:
        return draw(st.sampled_from(["a", ""]) if datatype == "BYTES" else st.integers(0, 9))
    length = draw(st.one_of(st.just(shape[0]), st.just(shape[0]), st.integers(0, 3)))
    return [draw(_nested(shape[1:], datatype)) for _ in range(length)]


@settings(max_examples=400, deadline=None)
@given(
    st.data(), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.sampled_from(["FP32", "INT8", "BYTES"])
)
def test_fast_path_equals_python_for_nested_lists(
    data: st.DataObject, shape: list[int], datatype: str
) -> None:
    levels = shape[data.draw(st.sampled_from([0, 0, 0, 1])) :]
    values = data.draw(_nested(levels, datatype))
    entry = {"name": "A", "datatype": datatype, "shape": shape, "data": values}
    body = json.dumps({"inputs": [entry]}).encode()
    assert read(body, plain=True) == read(body, plain=False)


def test_fast_path_reads_nested_lists() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    entry = {"name": "A", "datatype": "FP32", "shape": [2, 3, 4], "data": values.tolist()}
    plain = parse_plain_infer(json.dumps({"inputs": [entry]}).encode())
    assert plain is not None
    content = plain[1][0][3]
    assert isinstance(content, bytearray) and content == values.tobytes()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_fast_path_equals_python_on_corrupted_json(data: st.DataObject) -> None:
    text = bytearray(
        b'{"id":"1","inputs":[{"name":"A","shape":[2,1],"datatype":"FP32","data":[1.5,-2e3]},{"name":"B","shape":[1],'
        b'"datatype":"BYTES","data":["x"]}],"outputs":[{"name":"C","parameters":{"binary_data":false}}]}'
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        replacement = data.draw(
            st.sampled_from([b"", b"0", b"-", b".", b"e", b'"', b",", b"}", b"]", b"\\", b"\xff"])
        )
        text[at : at + data.draw(st.integers(0, 2))] = replacement
    assert read(bytes(text), plain=True) == read(bytes(text), plain=False)


@pytest.mark.parametrize("datatype", [name for name in NUMBERS if name != "FP16"])
def test_numbers_take_the_fast_path(datatype: str) -> None:
    dtype = DataType(datatype).dtype
    values = np.arange(6).astype(dtype)
    body = {"inputs": [{"name": "A", "shape": [2, 3], "datatype": datatype, "data": values.tolist()}]}
    plain = parse_plain_infer(orjson.dumps(body))
    assert plain is not None
    name, found, shape, content = plain[1][0]
    assert (name, found, shape) == ("A", datatype, (2, 3))
    assert np.array_equal(np.ndarray(shape, dtype, content), values.reshape(2, 3))


def test_text_and_binary_data_take_the_fast_path() -> None:
    body = {
        "id": "7",
        "parameters": {"binary_data_output": True},
        "inputs": [
            {"name": "A", "shape": [1, 2], "datatype": "BYTES", "data": ["ä", ""]},
            {"name": "B", "shape": [4], "datatype": "FP16", "parameters": {"binary_data_size": 8}},
            {"name": "C", "shape": [2], "datatype": "BOOL", "data": [True, False]},
        ],
        "outputs": [{"name": "O"}, {"name": "P", "parameters": {"binary_data": True}}],
    }
    assert parse_plain_infer(orjson.dumps(body)) == (
        "7",
        [
            ("A", "BYTES", (1, 2), ["ä".encode(), b""]),
            ("B", "FP16", (4,), 8),
            ("C", "BOOL", (2,), bytearray(b"\x01\x00")),
        ],
        [("O", False), ("P", True)],
        True,
    )


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_data_before_datatype_and_shape_takes_the_fast_path(datatype: str) -> None:
    """Members in alphabetical order, as some JSON libraries write them."""
    data = [[1.5, 2.5]] if datatype == "FP32" else [["a]", "b"]]
    body = {"inputs": [{"data": data, "datatype": datatype, "name": "A", "shape": [1, 2]}]}
    plain = parse_plain_infer(orjson.dumps(body))
    assert plain is not None
    content = np.array([1.5, 2.5], np.float32).tobytes() if datatype == "FP32" else [b"a]", b"b"]
    assert plain[1] == [("A", datatype, (1, 2), content)]


def test_inputs_beside_other_parameters_take_the_fast_path() -> None:
    outputs = [{"name": "O", "parameters": {"classification": 3}}]
    parameters = {"binary_data_output": True, "priority": 1, "text": '}]"'}
    body = {
        "inputs": [{"name": "A", "shape": [2], "datatype": "INT32", "data": [1, 2]}],
        "outputs": outputs,
        "parameters": parameters,
    }
    plain = parse_plain_infer(orjson.dumps(body, option=orjson.OPT_INDENT_2))
    assert plain is not None and plain[1] == [("A", "INT32", (2,), bytearray(b"\1\0\0\0\2\0\0\0"))]
    assert len(plain) == 5 and orjson.loads(plain[4]) == {"outputs": outputs, "parameters": parameters}


def test_inputs_are_writable() -> None:
    body = {"inputs": [{"name": "A", "shape": [2], "datatype": "INT32", "data": [1, 2]}]}
    request = Request("POST", b"/", b"", {}, orjson.dumps(body))
    model: Any = Model()
    inference, _ = http_codec.read_infer_request(request, model, "", SharedMemory(False), RequestLimits())
    assert inference.inputs["A"].array.flags.writeable


def test_json_is_counted_outside_strings() -> None:
    assert _wire.count_json(rb'{"a\"[,": [1, "\\", {}], "b": []}', 100) == (8, 3, 4)
    assert _wire.count_json(b'"never ends [,\\', 100) == (1, 1, 0)
    assert _wire.count_json(b"[1," * 1000, 10)[0] == 11  # stops
    assert _wire.count_json(b"", 10) == (1, 0, 0)
    large = b'["' + b"," * 100_000 + b'", 1]'  # counted without the interpreter lock
    assert _wire.count_json(memoryview(large), 10) == (3, 1, 1)


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_plain_floats_may_be_infinite_or_nan(datatype: str) -> None:
    text = b'{"inputs":[{"name":"A","datatype":"%b","shape":[5],"data":[NaN, Infinity,-Infinity,-1,1]}]}'
    plain = _wire.parse_plain_infer(text % datatype.encode())
    assert plain is not None
    values = np.frombuffer(plain[1][0][3], {"FP32": np.float32, "FP64": np.float64}[datatype])
    np.testing.assert_array_equal(values, [np.nan, np.inf, -np.inf, -1, 1])
    for wrong in (b"Na", b"-NaN", b"Inf", b"nan", b"+Infinity", b"NaNa"):
        assert _wire.parse_plain_infer(text.replace(b"NaN", wrong) % datatype.encode()) is None
    assert _wire.parse_plain_infer(text % b"INT32") is None
