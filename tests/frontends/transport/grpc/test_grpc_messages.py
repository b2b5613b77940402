"""Length-prefixed messages and status messages."""

from __future__ import annotations

import gzip
import itertools
import os
import time
import tracemalloc
import urllib.parse
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.frontends.transport.grpc.compression import Inflation, MessageError
from neso.frontends.transport.grpc.wire_format import (
    MessageReader,
    encode_status_message,
    message_prefix,
)


def read_all(reader: MessageReader) -> list[bytes]:
    messages = []
    while (message := reader.read()) is not None:
        messages.append(message.run() if isinstance(message, Inflation) else message)
    return messages


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_messages_split_anywhere(messages, data):
    body = b"".join(message_prefix(message) + message for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=10)))
    reader = MessageReader("identity", 1000)
    got: list[bytes] = []
    for begin, end in itertools.pairwise([0, *cuts, len(body)]):
        reader.feed(body[begin:end])
        if data.draw(st.booleans()):
            got += read_all(reader)
    assert got + read_all(reader) == messages
    assert not reader.missing


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8), st.sampled_from(["identity", "gzip", "deflate"]))
def test_invalid_input_raises_message_error(pieces, encoding):
    reader = MessageReader(encoding, 100)
    try:
        for piece in pieces:
            reader.feed(piece)
            assert all(len(message) <= 100 for message in read_all(reader))
    except MessageError as error:
        assert error.message


def test_many_small_messages_take_linear_time():
    reader = MessageReader("identity", 1000)
    start = time.thread_time()
    reader.feed(message_prefix(b"") * 200_000)
    assert len(read_all(reader)) == 200_000
    assert time.thread_time() - start < 5


def test_small_pieces_are_joined():
    reader = MessageReader("identity", 1 << 20)
    reader.feed(message_prefix(bytes(200_000)))
    tracemalloc.start()
    for _ in range(50_000):
        reader.feed(bytes(2))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 300_000  # an object per piece takes 2 MB


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 65_536, 3_000_000])
@pytest.mark.parametrize("random", [False, True])
def test_inflation_in_steps(encoding, size, random):
    plain = os.urandom(size) if random else bytes(size)
    packed = gzip.compress(plain, 1) if encoding == "gzip" else zlib.compress(plain, 1)
    inflation = Inflation(packed, encoding, size)
    first = inflation.start()
    assert (first if first is not None else inflation.run()) == plain
    with pytest.raises(MessageError, match="truncated"):
        Inflation(packed[:-1], encoding, size).run()
    if size:
        with pytest.raises(MessageError, match="larger than max"):
            Inflation(packed, encoding, size - 1).run()


def test_cancelled_inflation_ends_early():
    inflation = Inflation(gzip.compress(bytes(50_000_000), 1), "gzip", 64 << 20)
    assert inflation.start() is None
    inflation.cancelled = True
    with pytest.raises(MessageError):
        inflation.run()


@given(st.text(max_size=200))
def test_status_messages_are_percent_encoded(text):
    encoded = encode_status_message(text)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert (
        urllib.parse.unquote(encoded.decode("ascii"), errors="strict")
        == text.encode("utf-8", "replace").decode()
    )
