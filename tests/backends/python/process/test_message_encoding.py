"""Encoding of messages."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest

from neso.backends.python.process.codec import Decoder, encode
from neso.backends.python.process.messages import (
    Block,
    Execute,
    Log,
    Query,
    Reply,
    RequestData,
    TensorData,
    WorkDone,
)

TENSOR = TensorData("T", "FP32", (1,), None, Block(0, 9, 0, 4))
MESSAGES = [
    WorkDone(3),
    Query(1, "load_model", ("m", None, {"file:1/model.py": b"\0\xff"})),
    Reply(2, math.inf, ("no", "INTERNAL")),
    Log("a", 30, "ü\ud800", "/p", 3, {"model": "m"}),
    Execute(
        7,
        ((1, RequestData("m", (TENSOR,), "1", "", (), {}, 0, 0, 2**63, True, False, None)),),
        20,
    ),
]  # fmt: skip


def test_messages_are_decoded_from_arbitrary_chunks():
    data = b"".join(map(encode, MESSAGES))
    for size in (1, 7, len(data)):
        decoder = Decoder()
        got = [m for i in range(0, len(data), size) for m in decoder.feed(data[i : i + size])]
        assert got == MESSAGES and list(map(type, got)) == list(map(type, MESSAGES))


@pytest.mark.parametrize("value", [np.float64(1), object(), print, Decoder])
def test_only_plain_data_can_be_sent(value):
    with pytest.raises(TypeError, match="cannot be passed to the server"):
        encode(Reply(1, value))


def test_unpickler_only_instantiates_messages():
    body = pickle.dumps(print)
    with pytest.raises(pickle.UnpicklingError, match="must not be in a message"):
        list(Decoder().feed(len(body).to_bytes(4, "little") + body))
