"""Header blocks: the decoder's cache, encoding, and the PeerSettings and TokenBucket helpers."""

from __future__ import annotations

import logging

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.frontends.transport.http2 import encode_headers
from neso.frontends.transport.http2.flow_control import TokenBucket
from neso.frontends.transport.http2.frames import Http2ConnectionError, header_frames
from neso.frontends.transport.http2.headers import HeaderDecoder
from neso.frontends.transport.http2.settings import PeerSettings

names = st.sampled_from([b"a", b"bb", b"content-type", b"x" * 50])
fields = st.lists(st.tuples(names, st.sampled_from([b"", b"1", b"2", b"v" * 60])), max_size=5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(fields, st.sampled_from([None, 0, 60, 128, 4096])), max_size=12))
def test_cached_blocks_decode_correctly(lists):
    encoder, ours = hpack.Encoder(), HeaderDecoder(1 << 16)
    for headers, table_size in lists:
        if table_size is not None:
            encoder.header_table_size = table_size  # entries of small tables are evicted within one block
        for _ in range(2):
            assert list(ours.decode(encoder.encode(headers))) == headers


def test_headers_are_not_logged(caplog):
    """hpack's debug lines contain the values."""
    with caplog.at_level(logging.DEBUG):
        HeaderDecoder(1 << 16).decode(hpack.Encoder().encode([(b"authorization", b"secret")]))
        encode_headers([(b"authorization", b"secret")])
    assert not caplog.records


def test_repeated_blocks_are_cached():
    encoder, decoder = hpack.Encoder(), HeaderDecoder(1 << 16)
    first, second, third = (decoder.decode(encoder.encode([(b"a", b"b")])) for _ in range(3))
    assert first == second and second is third


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=40_000)), max_size=4))
def test_hpack_decodes_encoded_headers(headers):
    decoder = hpack.Decoder(1 << 20)
    assert [tuple(each) for each in decoder.decode(encode_headers(headers), raw=True)] == headers


@pytest.mark.parametrize("size", [0, 10, 11, 35])
def test_header_blocks_are_split_into_frames(size):
    block = bytes(range(size))
    whole = header_frames(3, block, 1, 10)
    payloads, ends = b"", []
    while whole:
        length = int.from_bytes(whole[:3], "big")
        payloads, ends, whole = payloads + whole[9 : 9 + length], [*ends, whole[4] & 4], whole[9 + length :]
    assert payloads == block
    assert ends[-1] == 4 and not any(ends[:-1])


def test_table_size_update_is_sent_once():
    peer = PeerSettings()
    peer.update(b"\0\1\0\0\x10\0")
    assert peer.table_update == b""
    peer.update(b"\0\1\0\0\0\x10")
    assert peer.table_update == b"\x20"
    peer.table_update = b""
    peer.update(b"\0\1\0\0\0\0")
    assert peer.table_update == b""


def test_token_bucket_refills(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    bucket = TokenBucket("pieces", 5, 10)
    for _ in range(5):
        bucket.consume()
    with pytest.raises(Http2ConnectionError, match="too many pieces"):
        bucket.consume()
    now += 0.35
    for _ in range(2):
        bucket.consume()
    now += 1000
    for _ in range(5):
        bucket.consume()
    with pytest.raises(Http2ConnectionError):
        for _ in range(2):
            bucket.consume()
