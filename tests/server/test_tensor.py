"""The binary tensor format: numbers and lengths of string elements."""

from __future__ import annotations

import pytest

from neso.server.errors import InvalidArgument
from neso.server.tensor import DataType, Tensor


def test_number_of_strings_from_clients_is_limited() -> None:
    data = b"\0\0\0\0" * 5
    assert Tensor.from_wire("s", DataType.BYTES, (5,), data, max_strings=5).array.tolist() == [b""] * 5
    with pytest.raises(
        InvalidArgument, match="expected at most 4 string elements for inference input 's', got 5"
    ):
        Tensor.from_wire("s", DataType.BYTES, (5,), data, max_strings=4)


def test_lengths_of_strings_beyond_the_data() -> None:
    for data in (b"\xff\xff\xff\xff", b"\5\0\0\0abcd", b"\1\0\0\0a\0\0"):
        with pytest.raises(
            InvalidArgument, match=r"expected 2 string elements for inference input 's', got [01]"
        ):
            Tensor.from_wire("s", DataType.BYTES, (2,), data)
