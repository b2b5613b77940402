"""Reads of blocks from a process that is killed or stopped while they are copied."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from eventually import wait_until
from transfer_engines import needs_nixl

from neso.engine.kv_transfer import connection as connection_module
from neso.engine.kv_transfer.config import Via
from neso.engine.kv_transfer.exports import ExportTable
from neso.engine.kv_transfer.fetch import Fetch, Fetcher, Prefix
from neso.engine.kv_transfer.format import KvFormat, prefix_digest
from neso.engine.kv_transfer.nixl import NixlAgent, NixlRead, open_nixl
from neso.engine.kv_transfer.readers import MessageReader, NixlReader
from neso.engine.kv_transfer.server import KvServer
from neso.engine.runners.shared_cache import CacheShape, SharedCache

NUM_BLOCKS, PARTS, PART_BYTES = 32, 2, 1 << 16
TOKENS = [0] * NUM_BLOCKS
FORMAT = KvFormat(
    model="test", layout="fake", dtype="uint8", block_size=1, num_parts=PARTS, part_bytes=PART_BYTES
)


def export_blocks(via: Via, pipe: Connection) -> None:
    """Export all blocks of a cache whose bytes are the number of their block plus 1."""
    cache = SharedCache.create(CacheShape(PARTS, NUM_BLOCKS, PART_BYTES))
    for block in range(NUM_BLOCKS):
        cache.blocks[:, block] = block + 1
    table = ExportTable()
    export = table.begin("t")
    export.num_tokens, export.digest = NUM_BLOCKS, prefix_digest((), TOKENS)
    table.publish(export, list(range(NUM_BLOCKS)), cache.epochs.tolist())
    nixl = open_nixl(cache, via, wanted=False)
    server = KvServer(cache, FORMAT, table, nixl=None if nixl is None else nixl.memory)
    pipe.send(server.address)
    pipe.recv()


class Importer:
    """Fetches the blocks of an exporting process, four at a time."""

    def __init__(self, via: Via) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=export_blocks, args=(via, theirs), daemon=True)
        self.process.start()
        theirs.close()
        address = self._pipe.recv()
        self.cache = SharedCache.create(CacheShape(PARTS, NUM_BLOCKS, PART_BYTES))
        self.fetcher = Fetcher(self.cache, FORMAT, via, open_nixl(self.cache, via, wanted=False))
        targets = list(range(NUM_BLOCKS))[::-1]
        self.fetch = Fetch(address, "t", Prefix((), TOKENS), 0, targets, time.monotonic() + 60)
        self.thread = threading.Thread(target=self.fetcher.run, args=(self.fetch,))

    def signal(self, number: int) -> None:
        """Send a signal, and wait until it has stopped or ended the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join()
        elif number == signal.SIGSTOP:
            threads = Path(f"/proc/{self.process.pid}/task")
            wait_until(lambda: all("State:\tT" in (one / "status").read_text() for one in threads.iterdir()))

    def assert_content(self, num_blocks: int) -> None:
        assert self.fetch.num_blocks == num_blocks
        for block, target in enumerate(self.fetch.targets[:num_blocks]):
            assert (self.cache.blocks[:, target] == block + 1).all()

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.fetcher.stop()
        self.thread.join()
        self.fetcher.close()


@pytest.fixture
def importer(monkeypatch):
    """`importer(via)` starts an exporting process."""
    for reader in (MessageReader, NixlReader):
        monkeypatch.setattr(reader, "max_bytes", 4 * PARTS * PART_BYTES)
    monkeypatch.setenv("UCX_TLS", "tcp")  # the exporting process takes part in the copy, as between hosts
    started: list[Importer] = []

    def start(via: Via) -> Importer:
        started.append(Importer(via))
        return started[-1]

    yield start
    for one in started:
        one.close()


@needs_nixl
@pytest.mark.parametrize("when", ["before the read", "during the read"])
def test_nixl_notices_at_once_that_the_process_was_killed(importer, monkeypatch, when):
    reading = importer("nixl")
    read, number = NixlAgent.read, iter(range(100))

    def read_and_kill(self, *blocks) -> NixlRead:
        now = next(number) == 3
        if now:
            reading.signal(signal.SIGSTOP if when == "during the read" else signal.SIGKILL)
        begun = read(self, *blocks)
        if now and when == "during the read":
            reading.signal(signal.SIGKILL)
        return begun

    monkeypatch.setattr(NixlAgent, "read", read_and_kill)
    reading.thread.start()
    reading.thread.join()
    assert "NIXL" in reading.fetch.error and "DISCONNECT" in reading.fetch.error
    reading.assert_content(12)
    assert reading.fetch.ended.is_set()


@needs_nixl
def test_targets_are_not_free_before_a_stopped_process_has_sent_them(importer, monkeypatch):
    reading = importer("nixl")
    read, number = NixlAgent.read, iter(range(100))

    def stop_and_read(self, *blocks) -> NixlRead:
        if next(number) == 3:
            reading.signal(signal.SIGSTOP)
            monkeypatch.setattr(connection_module, "ANSWER_SECONDS", 0.5)
        return read(self, *blocks)

    monkeypatch.setattr(NixlAgent, "read", stop_and_read)
    reading.thread.start()
    assert reading.fetch.done.wait(60)
    assert "did not answer in time" in reading.fetch.error
    reading.assert_content(12)
    assert not reading.fetch.ended.is_set()
    late = reading.fetch.targets[12]
    assert not (reading.cache.blocks[:, late] == 13).all()
    reading.signal(signal.SIGCONT)
    assert reading.fetch.ended.wait(60)
    wait_until(lambda: bool((reading.cache.blocks[:, late] == 13).all()))


def test_blocks_before_the_kill_are_kept_with_messages(importer, monkeypatch):
    reading = importer("messages")
    read, number = MessageReader.read, iter(range(100))

    def kill_and_read(self, *blocks) -> list[int]:
        if next(number) == 3:
            reading.signal(signal.SIGKILL)
            monkeypatch.setattr(connection_module, "ANSWER_SECONDS", 0.5)
        return read(self, *blocks)

    monkeypatch.setattr(MessageReader, "read", kill_and_read)
    reading.thread.start()
    reading.thread.join()
    assert "did not answer in time" in reading.fetch.error
    reading.assert_content(12)
