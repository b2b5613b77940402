"""`NixlReader` on slow connections, in virtual time: a read is given up when it makes no progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neso.engine.kv_transfer import readers
from neso.engine.kv_transfer.connection import ANSWER_SECONDS, TransferError
from neso.engine.kv_transfer.nixl import MIN_PIECE_BYTES, NixlMemory, Peer
from neso.engine.kv_transfer.protocol import Content
from neso.engine.kv_transfer.readers import NixlReader
from neso.engine.runners.shared_cache import CacheShape, SharedCache

BLOCK_BYTES = 1 << 18


class Link:
    """A clock, and an agent and a connection whose reads share `bytes_per_second`."""

    closing = False

    def __init__(self, bytes_per_second: float, cache: SharedCache) -> None:
        self.now = self._free = 0.0
        self.cache, self.bytes_per_second, self.token = cache, bytes_per_second, ""
        self.pieces: list[int] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.01)

    def read(self, peer: Any, blocks: list[int], targets: list[int], own: SharedCache) -> Any:
        self.pieces.append(len(blocks) * BLOCK_BYTES)
        end = self._free = max(self.now, self._free) + self.pieces[-1] / self.bytes_per_second
        return SimpleNamespace(has_ended=lambda: self.now >= end)

    def disconnect(self, peer: Any) -> None:
        pass

    def next_end(self) -> float:
        return self.now + ANSWER_SECONDS

    def check(self, end: float) -> None:
        if self.now >= end:
            raise TransferError("the other engine did not answer in time", "timeout")

    def ask(self, query: Any, kind: Any) -> Content:
        return Content([0] * len(query.blocks))


@pytest.fixture
def open_reader(monkeypatch):
    def make(bytes_per_second: float) -> tuple[Any, Link]:
        link: Any = Link(bytes_per_second, SharedCache.create(CacheShape(1, 256, BLOCK_BYTES)))
        monkeypatch.setattr(readers, "time", link)
        peer = Peer("e", "e", NixlMemory(b"", 0, 256))
        return NixlReader(link, peer, link, link.cache), link

    return make


BLOCKS = list(range(256))  # 64 MiB


@pytest.mark.parametrize("speed", [5e5, 6e6, 1e9])
def test_a_slow_read_that_makes_progress_is_not_given_up(open_reader, speed):
    reader, link = open_reader(speed)
    assert reader.read(BLOCKS, BLOCKS) == [0] * 256
    assert sum(link.pieces) == 256 * BLOCK_BYTES
    reader.close()


def test_pieces_grow_on_a_fast_connection_and_stay_small_on_a_slow_one(open_reader):
    reader, link = open_reader(1e9)
    reader.read(BLOCKS, BLOCKS)
    assert link.pieces[0] == MIN_PIECE_BYTES and max(link.pieces) >= 8 * MIN_PIECE_BYTES
    reader, link = open_reader(5e5)
    reader.read(BLOCKS, BLOCKS)
    assert max(link.pieces) == MIN_PIECE_BYTES


def test_a_read_without_progress_is_given_up(open_reader):
    reader, _ = open_reader(1.0)
    with pytest.raises(TransferError, match="did not answer in time"):
        reader.read(BLOCKS, BLOCKS)
