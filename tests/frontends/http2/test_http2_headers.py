"""Header blocks: the memory for those that come again, against a decoder without one."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.frontends.http2 import encode_headers
from neso.frontends.http2.budget import Budget
from neso.frontends.http2.frames import ConnectionFault, header_frames
from neso.frontends.http2.headers import HeaderDecoder
from neso.frontends.http2.peer_settings import PeerSettings

names = st.sampled_from([b"a", b"bb", b"content-type", b"x" * 50])
fields = st.lists(st.tuples(names, st.sampled_from([b"", b"1", b"2", b"v" * 60])), max_size=5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(fields, st.sampled_from([None, 0, 60, 128, 4096])), max_size=12))
def test_remembered_blocks_mean_what_they_meant(lists):
    encoder, ours = hpack.Encoder(), HeaderDecoder(1 << 16)
    for headers, table_size in lists:
        if table_size is not None:
            encoder.header_table_size = table_size  # small tables are replaced as a whole, within one block
        for _ in range(2):
            assert list(ours.decode(encoder.encode(headers))) == headers


def test_equal_blocks_are_read_once():
    encoder, decoder = hpack.Encoder(), HeaderDecoder(1 << 16)
    first, second, third = (decoder.decode(encoder.encode([(b"a", b"b")])) for _ in range(3))
    assert first == second and second is third


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=300), st.binary(max_size=40_000)), max_size=4))
def test_what_we_write_others_read(headers):
    decoder = hpack.Decoder(1 << 20)
    assert [tuple(each) for each in decoder.decode(encode_headers(headers), raw=True)] == headers


@pytest.mark.parametrize("size", [0, 10, 11, 35])
def test_blocks_are_cut_into_frames(size):
    block = bytes(range(size))
    whole = header_frames(3, block, 1, 10)
    payloads, ends = b"", []
    while whole:
        length = int.from_bytes(whole[:3], "big")
        payloads, ends, whole = payloads + whole[9 : 9 + length], [*ends, whole[4] & 4], whole[9 + length :]
    assert payloads == block
    assert ends[-1] == 4 and not any(ends[:-1])


def test_the_table_is_shrunk_once():
    peer = PeerSettings()
    peer.update(b"\0\1\0\0\x10\0")
    assert peer.table_update == b""
    peer.update(b"\0\1\0\0\0\x10")
    assert peer.table_update == b"\x20"
    peer.table_update = b""
    peer.update(b"\0\1\0\0\0\0")
    assert peer.table_update == b""


def test_a_budget_comes_back(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    budget = Budget("pieces", 5, 10)
    for _ in range(5):
        budget.spend()
    with pytest.raises(ConnectionFault, match="too many pieces"):
        budget.spend()
    now += 0.35
    for _ in range(2):
        budget.spend()
    now += 1000
    for _ in range(5):
        budget.spend()
    with pytest.raises(ConnectionFault):
        for _ in range(2):
            budget.spend()
