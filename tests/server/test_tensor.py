"""The binary tensor format: numbers and lengths of string elements."""

from __future__ import annotations

import runpy
import sys

import pytest

from neso.server import tensor
from neso.server.errors import InvalidArgument
from neso.server.tensor import DataType, Tensor


def test_number_of_strings_from_clients_is_limited() -> None:
    data = b"\0\0\0\0" * 5
    assert Tensor.from_wire("s", DataType.BYTES, (5,), data, max_strings=5).array.tolist() == [b""] * 5
    with pytest.raises(
        InvalidArgument, match="expected at most 4 string elements for inference input 's', got 5"
    ):
        Tensor.from_wire("s", DataType.BYTES, (5,), data, max_strings=4)


@pytest.fixture(params=["native", "python"])
def splitting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split strings in native code, and in Python as in processes of models with their own environment."""
    if request.param == "python":
        monkeypatch.setitem(sys.modules, "neso._wire", None)
        names = runpy.run_path(tensor.__file__, run_name="neso.server.tensor")
        monkeypatch.setattr(tensor, "split_strings", names["split_strings"])


@pytest.mark.usefixtures("splitting")
def test_strings_round_trip() -> None:
    texts = [b"", b"a", bytes(range(256)), b"\0" * 5]
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    found = Tensor.from_wire("s", DataType.BYTES, (2, 2), memoryview(data))
    assert found.array.tolist() == [texts[:2], texts[2:]]
    assert found.to_wire() == data


@pytest.mark.usefixtures("splitting")
def test_lengths_of_strings_beyond_the_data() -> None:
    for data in (b"\xff\xff\xff\xff", b"\5\0\0\0abcd", b"\1\0\0\0a\0\0"):
        with pytest.raises(
            InvalidArgument, match=r"expected 2 string elements for inference input 's', got [01]"
        ):
            Tensor.from_wire("s", DataType.BYTES, (2,), data)
