"""Fast path of the infer writer (C++): equal bytes to Python, and used for common responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso._wire import write_plain_infer
from neso.frontends.kserve import http_codec
from neso.frontends.kserve.http_codec import OutputFormat
from neso.frontends.transport.http1 import Response
from neso.server.errors import ServerError
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import DataType, Tensor

FIXED_SIZE = [datatype for datatype in DataType if datatype is not DataType.BYTES]

_names = st.one_of(
    st.sampled_from(["OUTPUT0", "ä", 'a"b', "a\\b", "\n", "\x7f", "\ud800"]), st.text(max_size=3)
)
_shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def _tensors(draw: st.DrawFn) -> Tensor:
    datatype = draw(st.sampled_from(list(DataType)))
    shape = draw(_shapes)
    count = int(np.prod(shape))
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
        array[:] = draw(st.lists(st.binary(max_size=4), min_size=count, max_size=count))
    else:
        size = count * datatype.dtype.itemsize
        data = draw(st.binary(min_size=size, max_size=size))
        array = np.frombuffer(data, datatype.dtype)
    return Tensor(draw(_names), datatype, array.reshape(shape))


def write(response: InferenceResponse, output_format: OutputFormat, *, plain: bool) -> Any:
    """Result of `write_infer_response` in comparable form."""
    native = http_codec.write_plain_infer
    if not plain:
        http_codec.write_plain_infer = lambda *arguments: None  # type: ignore[assignment]
    try:
        reply = http_codec.write_infer_response(response, output_format)
    except ServerError as error:
        return error.message
    except TypeError as error:  # raised by orjson for invalid Unicode
        return str(error)
    finally:
        http_codec.write_plain_infer = native
    return reply.status, reply.content_type, tuple(reply.headers), whole(reply)


def whole(response: Response) -> bytes:
    return response.body if isinstance(response.body, bytes) else b"".join(response.body)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(_tensors(), max_size=3),
    st.text(max_size=3),
    _names,
    st.booleans(),
    st.dictionaries(st.sampled_from(["OUTPUT0", "ä"]), st.booleans()),
    st.sampled_from([{}, {"a": 1}]),
)
def test_fast_path_equals_python(
    outputs: list[Tensor],
    request_id: str,
    model: str,
    default: bool,
    binary: dict[str, bool],
    parameters: dict[str, Any],
) -> None:
    response = InferenceResponse(model, "1", request_id, outputs, parameters)
    output_format = OutputFormat(default, binary)
    assert write(response, output_format, plain=True) == write(response, output_format, plain=False)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), st.booleans())
def test_fast_path_formats_numbers_like_python(values: list[float], single: bool) -> None:
    with np.errstate(over="ignore"):
        array = np.array(values, np.float32 if single else np.float64)
    response = InferenceResponse("m", "1", outputs=[Tensor.from_numpy("A", array[np.isfinite(array)])])
    assert plain_body(response) == whole(http_codec._write_in_python(response, OutputFormat()))


def test_fast_path_formats_all_magnitudes_like_python() -> None:
    powers = [
        float(f"{digits}e{exponent}") for exponent in range(-323, 308) for digits in ("1", "12.5", "-9")
    ]
    edges = [
        0.0,
        -0.0,
        5e-324,
        1.7976931348623157e308,
        2.0**53,
        1e15,
        1e15 - 1,
        999999999999999.9,
        123456789.125,
    ]
    response = InferenceResponse("m", "1", outputs=[Tensor.from_numpy("A", np.array(powers + edges))])
    assert plain_body(response) == whole(http_codec._write_in_python(response, OutputFormat()))


@pytest.mark.parametrize("datatype", FIXED_SIZE)
@pytest.mark.parametrize("binary", [False, True])
def test_common_responses_take_the_fast_path(datatype: DataType, binary: bool) -> None:
    tensor = Tensor("A", datatype, np.ones((2, 3), datatype.dtype))
    plain = write_plain_infer("7", "m", "1", [tensor], {}, binary)
    if datatype in (DataType.FP16, DataType.BF16) and not binary:
        assert plain is None  # not representable in JSON
    else:
        assert plain is not None
        assert len(plain[0]) - plain[1] == (tensor.byte_size if binary else 0)


@pytest.mark.parametrize(
    "array",
    [
        np.array([np.nan], np.float32),
        np.array([-np.inf]),
        np.zeros(8193),  # large
        np.zeros((4, 4))[:, ::2],  # not in C order, which backends do not produce
        np.array([b"x"], np.object_),
    ],
    ids=["nan", "infinity", "large", "strided", "bytes"],
)
def test_other_responses_are_written_in_python(array: np.ndarray[Any, Any]) -> None:
    tensor = Tensor("A", DataType.of_numpy(array.dtype), array)
    assert write_plain_infer("", "m", "1", [tensor], {}, False) is None


def test_large_response_leaks_nothing() -> None:
    """The writer reuses its buffer."""
    small = InferenceResponse("m", "1", outputs=[Tensor.from_numpy("A", np.arange(3))])
    before = plain_body(small)
    assert write_plain_infer("", "m", "1", [Tensor.from_numpy("A", np.full(8000, np.nan))], {}, False) is None
    assert write_plain_infer("", "m", "1", [Tensor.from_numpy("A", np.ones(8000))], {}, True) is not None
    assert plain_body(small) == before


def plain_body(response: InferenceResponse) -> bytes:
    plain = write_plain_infer(
        response.id, response.model_name, response.model_version, response.outputs, {}, False
    )
    assert plain is not None
    return plain[0]
