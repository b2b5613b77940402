"""Length-prefixed messages and status messages."""

from __future__ import annotations

import itertools
import time
import urllib.parse

from hypothesis import given, settings
from hypothesis import strategies as st

from neso.frontends.transport.grpc.wire_format import (
    MessageError,
    MessageReader,
    encode_status_message,
    message_prefix,
)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_messages_split_anywhere(messages, data):
    body = b"".join(message_prefix(message) + message for message in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=10)))
    reader = MessageReader("identity", 1000)
    got: list[bytes] = []
    for begin, end in itertools.pairwise([0, *cuts, len(body)]):
        got += reader.feed(body[begin:end])
    assert got == messages
    assert not reader.in_message


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=8), st.sampled_from(["identity", "gzip", "deflate"]))
def test_invalid_input_raises_message_error(pieces, encoding):
    reader = MessageReader(encoding, 100)
    try:
        for piece in pieces:
            for message in reader.feed(piece):
                assert len(message) <= 100
    except MessageError as error:
        assert error.message


def test_many_small_messages_take_linear_time():
    reader = MessageReader("identity", 1000)
    start = time.thread_time()
    assert len(reader.feed(message_prefix(b"") * 200_000)) == 200_000
    assert time.thread_time() - start < 5


@given(st.text(max_size=200))
def test_status_messages_are_percent_encoded(text):
    encoded = encode_status_message(text)
    assert all(0x20 <= byte <= 0x7E for byte in encoded)
    assert (
        urllib.parse.unquote(encoded.decode("ascii"), errors="strict")
        == text.encode("utf-8", "replace").decode()
    )
