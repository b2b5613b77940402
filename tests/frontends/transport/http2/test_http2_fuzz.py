"""Random input never raises: the connection keeps working, or closes with GOAWAY."""

from __future__ import annotations

import asyncio
import itertools

from http2_client import POST, Client, frame
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.frontends.transport.http2 import Http2Options, encode_headers, frames
from neso.frontends.transport.http2.frames import FrameReader

REAL_BLOCKS = [
    POST,
    POST + encode_headers([(b"a", b"b")]),
    b"\x40\x01a\x01b" + POST,
    POST + b"\x40\x01a\x01b\xbe",
    b"\x20",
]

frame_bytes = st.builds(
    frame,
    st.one_of(st.integers(0, 9), st.integers(0, 255)),
    st.one_of(st.sampled_from([0, 1, 4, 5]), st.integers(0, 255)),
    st.one_of(st.integers(0, 12), st.integers(0, 2**32 - 1)),
    st.one_of(
        st.sampled_from(REAL_BLOCKS),
        st.binary(max_size=40),
        st.integers(0, 2**32 - 1).map(lambda number: number.to_bytes(4, "big")),
        st.sampled_from([bytes(8), bytes(5), bytes(1000)]),
    ),
)


def check(pieces: list[bytes]) -> None:
    async def run() -> None:
        client = Client(Http2Options(turn=60.0))
        client.server.data_received(frames.PREFACE + frame(frames.SETTINGS, 0, 0))
        for piece in pieces:
            client.server.data_received(piece)
        said = [(kind, payload) for kind, _, _, payload in read(client.transport.take())]
        ended = client.transport.eof or client.transport.aborted
        kinds = [kind for kind, _ in said]
        if ended:
            assert frames.GOAWAY in kinds or any(b"\x07" in piece for piece in pieces)  # sent by either side
            assert not client.server.streams
            assert not any(
                payload.endswith(b"internal error") for kind, payload in said if kind == frames.GOAWAY
            )
        else:
            assert frames.GOAWAY not in kinds
        client.server.connection_lost(None)
        assert not client.server.streams and not client.server.queued
        assert len(client.echo.of("end")) <= len(client.echo.of("begin"))

    asyncio.run(run())


def read(data: bytes) -> list[tuple[int, int, int, bytes]]:
    reader = FrameReader(1 << 24)
    reader.preface_received = True
    return list(reader.feed(data))


@settings(max_examples=300, deadline=None)
@given(st.lists(frame_bytes, max_size=25))
def test_random_frames(pieces):
    check(pieces)


@settings(max_examples=100, deadline=None)
@given(st.lists(frame_bytes, min_size=1, max_size=10), st.data())
def test_random_frames_split_and_corrupted(pieces, data):
    whole = bytearray(b"".join(pieces))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    edges = [0, *cuts, len(whole)]
    check([bytes(whole[a:b]) for a, b in itertools.pairwise(edges)])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=6))
def test_random_bytes_instead_of_the_preface(pieces):
    async def run() -> None:
        client = Client(Http2Options(turn=60.0))
        for piece in pieces:
            client.server.data_received(piece)
        client.server.eof_received()
        client.server.connection_lost(None)
        assert client.transport.closed

    asyncio.run(run())


@settings(max_examples=100, deadline=None)
@given(st.lists(frame_bytes, max_size=10), st.data())
def test_frame_parsing_does_not_depend_on_splits(pieces, data):
    whole = frames.PREFACE + b"".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    edges = [0, *cuts, len(whole)]
    reader, other = FrameReader(1 << 24), FrameReader(1 << 24)
    cut = [each for a, b in itertools.pairwise(edges) for each in reader.feed(whole[a:b])]
    assert cut == list(other.feed(whole))
    assert len(cut) == len(pieces)
