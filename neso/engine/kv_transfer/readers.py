"""How blocks of another engine are read: shared memory, NIXL or messages. The handshake chooses."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from neso.engine.kv_transfer.config import Via
from neso.engine.kv_transfer.connection import Connection, TransferError
from neso.engine.kv_transfer.conversion import Converter, mismatch
from neso.engine.kv_transfer.format import KvFormat
from neso.engine.kv_transfer.nixl import MIN_PIECE_BYTES, NixlAgent, NixlError, NixlRead, Peer
from neso.engine.kv_transfer.protocol import Content, Ended, Epochs, Hello, Memory, Read, Welcome, host_id
from neso.engine.kv_transfer.server import MAX_READ_BYTES
from neso.engine.runners.shared_cache import CacheShape, SharedCache, block_runs

_MAX_MAPPED = 64
"""Number of engines whose memory stays mapped."""
_POLL_SECONDS = 0.0002
_MAX_PIECE_BYTES = 64 << 20
_FAST_PIECE_SECONDS = 0.25


class BlockReader(Protocol):
    """Reads blocks of another engine, at most `max_bytes` or one block at a time. `transport`: see `KvImported`."""

    transport: str
    max_bytes: int

    def read(self, blocks: list[int], targets: list[int]) -> list[int]:
        """Copy blocks of the other engine to own blocks, and return the epochs that they have afterwards.

        Raises `TransferError`.
        """

    def close(self) -> None:
        """Wait until nothing is written to targets any more, also after an error."""


class SharedMemoryReader:
    """Copies from the mapped memory of an engine on this host."""

    transport = "shm"
    max_bytes = 64 << 20

    def __init__(self, own: SharedCache, other: SharedCache) -> None:
        self._own, self._other = own, other

    def read(self, blocks: list[int], targets: list[int]) -> list[int]:
        for source, target, count in block_runs(blocks, targets):
            self._own.blocks[:, target : target + count] = self._other.blocks[:, source : source + count]
        return [int(self._other.epochs[block]) for block in blocks]

    def close(self) -> None:
        pass


class MessageReader:
    """Asks the KV server for the content of blocks."""

    transport = "messages"
    max_bytes = MAX_READ_BYTES

    def __init__(self, own: SharedCache, connection: Connection) -> None:
        self._own, self._connection = own, connection

    def read(self, blocks: list[int], targets: list[int]) -> list[int]:
        shape = self._own.shape
        reply, content = self._connection.ask_for_content(Read(self._connection.token, blocks))
        if len(content) != len(blocks) * shape.block_bytes or len(reply.epochs) != len(blocks):
            raise TransferError(f"{len(blocks)} blocks came with {len(content)} bytes", "error")
        self._own.blocks[:, targets] = np.frombuffer(content, np.uint8).reshape(
            shape.num_parts, len(blocks), shape.part_bytes
        )
        return reply.epochs

    def close(self) -> None:
        pass


class NixlReader:
    """Reads the blocks with NIXL, two pieces at a time, and asks the KV server for their epochs.

    The wait for the other engine ends `ANSWER_SECONDS` after the last piece that has come. Pieces are small on a slow
    connection, so that it is not given up while it makes progress.
    """

    transport = "nixl"
    max_bytes = 256 << 20

    def __init__(self, agent: NixlAgent, peer: Peer, connection: Connection, own: SharedCache) -> None:
        self._agent, self._peer, self._connection, self._own = agent, peer, connection, own
        self._running: deque[NixlRead] = deque()
        self._registers = own is not agent.cache
        if self._registers:
            try:
                agent.register(own)
            except NixlError:
                agent.disconnect(peer)
                raise

    def read(self, blocks: list[int], targets: list[int]) -> list[int]:
        try:
            start = 0
            while start < len(blocks) or self._running:
                while start < len(blocks) and len(self._running) < 2:
                    piece = slice(
                        start, start + max(1, self._peer.piece_bytes // self._own.shape.block_bytes)
                    )
                    self._running.append(
                        self._agent.read(self._peer, blocks[piece], targets[piece], self._own)
                    )
                    start = piece.stop
                self._wait()
        except NixlError as error:
            raise TransferError(str(error), "disconnected") from None
        reply = self._connection.ask(Epochs(self._connection.token, blocks), Content)
        if isinstance(reply, Ended) or len(reply.epochs) != len(blocks):
            raise TransferError("the other engine sent no epochs", "error")
        return reply.epochs

    def _wait(self) -> None:
        """Wait for the first running piece, and make the next ones larger if it was fast."""
        started = time.monotonic()
        end = self._connection.next_end()
        while not self._running[0].has_ended():
            self._connection.check(end)
            time.sleep(_POLL_SECONDS)
        self._running.popleft()
        if time.monotonic() - started < _FAST_PIECE_SECONDS:
            self._peer.piece_bytes = min(2 * self._peer.piece_bytes, _MAX_PIECE_BYTES)
        else:
            self._peer.piece_bytes = max(self._peer.piece_bytes // 2, MIN_PIECE_BYTES)

    def close(self) -> None:
        while self._running and not self._agent.closing:
            try:
                if not self._running[0].has_ended():
                    time.sleep(_POLL_SECONDS)
                    continue
            except NixlError:  # it has ended with an error
                pass
            self._running.popleft()
        if self._registers and not self._running:
            self._agent.unregister(self._own)
        self._agent.disconnect(self._peer)


class Opened(NamedTuple):
    """A reader of blocks of the format `theirs`. With a converter, it reads into the converter's staging cache."""

    reader: BlockReader
    theirs: KvFormat
    converter: Converter | None

    @property
    def max_blocks(self) -> int:
        """Number of blocks to read at a time."""
        if self.converter is not None:
            return self.converter.staging.shape.num_blocks
        return max(1, self.reader.max_bytes // self.theirs.block_bytes)


class Readers:
    """Opens readers into the blocks of `own`. `nixl`: the agent of this engine; None if it has none."""

    def __init__(self, own: SharedCache, own_format: KvFormat, via: Via, nixl: NixlAgent | None) -> None:
        self._own = own
        self._format = own_format
        self._via = via
        self._nixl = nixl
        self._lock = threading.Lock()
        self._mapped: dict[str, SharedCache] = {}  # by the name of the engine

    def open(self, connection: Connection) -> Opened:
        """Shake hands with the other engine, and choose. Raises `TransferError` if it must be refused."""
        welcome = connection.ask(Hello(connection.token), Welcome)
        if isinstance(welcome, Ended):
            raise TransferError(welcome.reason)
        reason = mismatch(self._format, welcome.format)
        if reason:
            raise TransferError(f"the cache of the other engine is different: {reason}")
        converter = None
        if self._format != welcome.format:
            converter = Converter(self._own, self._format, welcome.format)
        into = self._own if converter is None else converter.staging
        return Opened(self._choose(connection, welcome, into), welcome.format, converter)

    def _choose(self, connection: Connection, welcome: Welcome, into: SharedCache) -> BlockReader:
        if self._via in ("auto", "shm"):
            memory = self._map(welcome)
            if memory is not None:
                return SharedMemoryReader(into, memory)
            if self._via == "shm":
                raise TransferError(
                    "kv_transfer_via=shm, but the memory of the other engine cannot be mapped"
                )
        if self._via in ("auto", "nixl"):
            if self._nixl is not None and welcome.nixl is not None:
                try:
                    peer = self._nixl.connect(welcome.engine, welcome.nixl)
                    return NixlReader(self._nixl, peer, connection, into)
                except NixlError as error:
                    raise TransferError(str(error), "disconnected") from None
            if self._via == "nixl":
                raise TransferError("kv_transfer_via=nixl, but the other engine has no NIXL")
        return MessageReader(into, connection)

    def close(self) -> None:
        """No reader may be open."""
        self._mapped.clear()

    def _map(self, welcome: Welcome) -> SharedCache | None:
        """Return the memory of the other engine; None if this process cannot map it."""
        memory, theirs = welcome.memory, welcome.format
        if memory.host != host_id():
            return None
        with self._lock:
            if welcome.engine not in self._mapped:
                mapped = _open_memory(
                    memory, CacheShape(theirs.num_parts, memory.num_blocks, theirs.part_bytes)
                )
                if mapped is None:
                    return None
                while len(self._mapped) >= _MAX_MAPPED:
                    self._mapped.pop(next(iter(self._mapped)))  # running fetches keep it mapped
                self._mapped[welcome.engine] = mapped
            return self._mapped[welcome.engine]


def _open_memory(memory: Memory, shape: CacheShape) -> SharedCache | None:
    try:
        mapped = SharedCache.open(f"/proc/{memory.pid}/fd/{memory.fd}", shape)
    except (OSError, ValueError):  # another container or user
        return None
    return mapped if os.fstat(mapped.fd).st_ino == memory.inode else None
