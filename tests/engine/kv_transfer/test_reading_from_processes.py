"""Exporting and importing processes that are killed or stopped while blocks are copied."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from eventually import wait_until
from fake_engine import expected_tokens
from transfer_engines import TransferEngine, needs_nixl

from neso.engine.config import EngineConfig
from neso.engine.errors import EngineError
from neso.engine.kv_transfer import connection as connection_module
from neso.engine.kv_transfer.config import Via
from neso.engine.kv_transfer.exports import ExportTable
from neso.engine.kv_transfer.fetch import Fetch, Fetcher, Prefix
from neso.engine.kv_transfer.format import KvFormat, prefix_digest
from neso.engine.kv_transfer.nixl import NixlAgent, NixlRead, open_nixl
from neso.engine.kv_transfer.readers import MessageReader, NixlReader, SharedMemoryReader
from neso.engine.kv_transfer.server import KvServer
from neso.engine.load.loader import load_engine
from neso.engine.runners.shared_cache import CacheShape, SharedCache
from neso.models import SHIPPED_MODELS

NUM_BLOCKS, PARTS, PART_BYTES = 32, 2, 1 << 16
TOKENS = [0] * NUM_BLOCKS
PROMPT = list(range(1, 23))
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


def import_and_hang(via: Via, address: str, pipe: Connection) -> None:
    """Import a prompt, and never come to the end of the first read."""

    def hang(*blocks: object) -> bool:
        pipe.send("reading")
        time.sleep(600)
        return False

    reader: Any = NixlRead if via == "nixl" else SharedMemoryReader
    setattr(reader, "has_ended" if via == "nixl" else "read", hang)
    engine = TransferEngine(via=via)
    engine.import_from(address, PROMPT)
    engine.run_until_finished("import t")


@pytest.mark.parametrize("via", ["shm", pytest.param("nixl", marks=needs_nixl)])
def test_another_engine_imports_after_a_reading_process_was_killed(via):
    prefill, decode = TransferEngine(via=via), TransferEngine(via=via)
    prefill.complete_export(PROMPT)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=import_and_hang, args=(via, prefill.address, theirs), daemon=True)
    process.start()
    assert ours.recv() == "reading"
    process.kill()
    process.join()
    prefill.step()
    assert prefill.stats.leases == 1
    decode.import_from(prefill, PROMPT)
    outputs = decode.run_until_finished("import t")
    assert (outputs[0].imported_tokens, outputs[0].import_error) == (20, "")
    assert decode.tokens("import t") == expected_tokens(PROMPT, 8)
    prefill.wait_until_empty()
    for engine in (prefill, decode):
        engine.core.close()


def load_with_little_memory(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    options = {"kv_transfer": True, "num_blocks": 4096, "num_threads": 1}
    try:
        load_engine(EngineConfig.from_options(str(SHIPPED_MODELS["neso-pilot"]), options))
    except EngineError as error:
        pipe.send(str(error))
    else:
        pipe.send("loaded")


def test_a_cache_that_does_not_fit_in_shared_memory_is_an_error_when_the_engine_starts():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=load_with_little_memory, args=(theirs,), daemon=True)
    process.start()
    assert "kv_transfer: no shared memory for a cache of 4096 blocks" in ours.recv()
    process.join()
