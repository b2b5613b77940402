"""Fetches blocks from the KV server of another engine, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import numpy as np
import zmq

from neso.engine.core.sequence import CacheToken
from neso.engine.kv_transfer.format import KvFormat, prefix_digest
from neso.engine.kv_transfer.protocol import (
    Content,
    Ended,
    Hello,
    KvAddress,
    Memory,
    Progress,
    Pull,
    Query,
    Read,
    Refused,
    Release,
    Reply,
    Welcome,
    encoder,
    host_id,
    reply_decoder,
)
from neso.engine.kv_transfer.server import MAX_READ_BYTES
from neso.engine.runners.shared_cache import CacheShape, SharedCache

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=Reply)

ANSWER_SECONDS = 10.0
"""Time after which an engine that does not answer is given up. It answers within `POLL_SECONDS` if it is well."""
_CANCEL_SECONDS = 0.1
"""Time within which a reader that waits for an answer notices that its request was aborted."""
_RELEASE_SECONDS = 1.0
"""Time that a reader waits for the answer to `Release`."""


class TransferError(Exception):
    """Blocks cannot be transferred; the message is for the log and the client."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens whose blocks a request wants, and the identity of the request and its adapter."""

    identity: tuple[str, ...]
    tokens: list[CacheToken] | list[int]


@dataclass(slots=True, eq=False)
class Fetch:
    """A transfer into the blocks `targets`, which are the blocks of a sequence from `first` on.

    The engine thread may read the results when `done` is set:

    - num_blocks: the first of the targets that have their content
    - error: why not all have; empty if the other engine does not have more
    - num_bytes, seconds: of the copies
    """

    address: str
    transfer_id: str
    prefix: Prefix
    first: int
    targets: list[int]
    deadline: float
    cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    num_blocks: int = 0
    error: str = ""
    num_bytes: int = 0
    seconds: float = 0.0


class BlockReader(Protocol):
    """Reads blocks of another engine."""

    def read(self, blocks: list[int], targets: list[int]) -> list[int]:
        """Copy blocks of the other engine to own blocks, and return the epochs that they have afterwards.

        Raises `TransferError`.
        """


class SharedMemoryReader:
    """Copies from the mapped memory of an engine on this host."""

    def __init__(self, own: SharedCache, other: SharedCache) -> None:
        self._own, self._other = own, other

    def read(self, blocks: list[int], targets: list[int]) -> list[int]:
        for start, end in _runs(blocks, targets):
            source, target = blocks[start], targets[start]
            count = end - start
            self._own.blocks[:, target : target + count] = self._other.blocks[:, source : source + count]
        return [int(self._other.epochs[block]) for block in blocks]


class MessageReader:
    """Asks the KV server for the content of blocks."""

    def __init__(self, own: SharedCache, connection: Connection) -> None:
        self._own, self._connection = own, connection

    def read(self, blocks: list[int], targets: list[int]) -> list[int]:
        shape = self._own.shape
        at_once = max(1, MAX_READ_BYTES // shape.block_bytes)
        epochs: list[int] = []
        for start in range(0, len(blocks), at_once):
            part = blocks[start : start + at_once]
            reply, content = self._connection.ask_for_content(Read(self._connection.token, part))
            if len(content) != len(part) * shape.block_bytes or len(reply.epochs) != len(part):
                raise TransferError(f"{len(part)} blocks came with {len(content)} bytes")
            values = np.frombuffer(content, np.uint8).reshape(shape.num_parts, len(part), shape.part_bytes)
            self._own.blocks[:, targets[start : start + at_once]] = values
            epochs += reply.epochs
        return epochs


class Connection:
    """A connection to a KV server; used by one thread.

    A question waits for `ANSWER_SECONDS` at most, until `deadline`, or until `is_cancelled` returns True.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        deadline: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        try:
            endpoint, self.token = KvAddress.parse(address)
        except ValueError as error:
            raise TransferError(f"the address {error}") from None
        self.deadline = deadline
        self._is_cancelled = is_cancelled
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise TransferError(f"cannot connect to {endpoint}: {error}") from None

    def ask(self, query: Query, kind: type[R]) -> R | Ended:
        """Return the reply. Raises `TransferError` if there is none in time or the query is refused."""
        return self._ask(query, kind)[0]

    def ask_for_content(self, query: Read) -> tuple[Content, memoryview]:
        """Return the reply to `Read` and its second frame. Raises `TransferError`."""
        reply, frames = self._ask(query, Content)
        if isinstance(reply, Ended) or len(frames) != 2:
            raise TransferError("the other engine sent no blocks")
        return reply, frames[1].buffer

    def _ask(self, query: Query, kind: type[R]) -> tuple[R | Ended, list[zmq.Frame]]:
        self._socket.send(encoder.encode(query))
        end = min(self.deadline, time.monotonic() + ANSWER_SECONDS)
        while not self._socket.poll(max(0, int(1000 * min(_CANCEL_SECONDS, end - time.monotonic())))):
            if self._is_cancelled():
                raise TransferError("the request was aborted")
            if time.monotonic() >= end:
                raise TransferError("the other engine did not answer in time")
        frames = self._socket.recv_multipart(copy=False)
        try:
            reply = reply_decoder.decode(frames[0].buffer)
        except msgspec.MsgspecError as error:
            raise TransferError(f"the other engine sent an invalid message: {error}") from None
        if isinstance(reply, Refused):
            raise TransferError(f"the other engine refused: {reply.reason}")
        if not isinstance(reply, kind | Ended):
            raise TransferError(f"the other engine sent {type(reply).__name__}")
        return reply, frames

    def close(self) -> None:
        self._socket.close()


class Fetcher:
    """Runs fetches into the blocks of `own`. `allow_shared_memory`: off to always ask for the content."""

    def __init__(self, own: SharedCache, own_format: KvFormat, *, allow_shared_memory: bool = True) -> None:
        self._own = own
        self._format = own_format
        self._allow_shared_memory = allow_shared_memory
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)
        self._lock = threading.Lock()
        self._mapped: dict[str, SharedCache] = {}  # by the name of the engine

    def run(self, fetch: Fetch) -> None:
        """Fetch blocks; the result is in `fetch`. Never raises."""
        try:
            connection = Connection(self._context, fetch.address, fetch.deadline, lambda: fetch.cancelled)
            try:
                self._run(fetch, connection)
                fetch.done.set()
                if not fetch.cancelled:
                    _release(connection, fetch.transfer_id)
            finally:
                connection.close()
        except TransferError as error:
            fetch.error = str(error)
        except Exception as error:
            logger.exception("a KV transfer failed")
            fetch.error = f"{type(error).__name__}: {error}"
        finally:
            fetch.done.set()

    def release(self, address: str, transfer_id: str) -> None:
        """End the lease of an export that is not needed. Never raises."""
        with contextlib.suppress(TransferError, zmq.ZMQError):
            connection = Connection(self._context, address, time.monotonic())
            try:
                _release(connection, transfer_id)
            finally:
                connection.close()

    def close(self) -> None:
        """Close the sockets; no fetch may be running."""
        self._mapped.clear()
        self._context.destroy(linger=0)

    def _run(self, fetch: Fetch, connection: Connection) -> None:
        reader = self._open(connection)
        size = self._format.block_size
        have = fetch.first
        end = fetch.first + len(fetch.targets)
        while have < end and not fetch.cancelled:
            state = connection.ask(Pull(connection.token, fetch.transfer_id, have), Progress)
            if isinstance(state, Ended):
                raise TransferError(state.reason)
            if state.blocks:
                self._check(fetch, state)
            blocks = state.blocks[: end - have]
            if blocks:
                targets = fetch.targets[have - fetch.first :][: len(blocks)]
                started = time.perf_counter()
                epochs = reader.read(blocks, targets)
                fetch.seconds += time.perf_counter() - started
                # Blocks whose epoch has changed were given to another sequence, maybe before they were read.
                intact = next(
                    (i for i, epoch in enumerate(state.epochs[: len(blocks)]) if epochs[i] != epoch),
                    len(blocks),
                )
                have += intact
                fetch.num_blocks += intact
                fetch.num_bytes += intact * self._format.block_bytes
            if state.complete and have >= state.num_tokens // size:
                break

    def _check(self, fetch: Fetch, state: Progress) -> None:
        """Check that an export has the content that the request needs. Raises `TransferError`."""
        tokens = fetch.prefix.tokens[: state.num_tokens]
        if state.digest != prefix_digest(fetch.prefix.identity, tokens):
            raise TransferError("the export has other tokens than the request, or another adapter")

    def _open(self, connection: Connection) -> BlockReader:
        welcome = connection.ask(Hello(connection.token), Welcome)
        if isinstance(welcome, Ended):
            raise TransferError(welcome.reason)
        difference = self._format.difference(welcome.format)
        if difference:
            raise TransferError(f"the cache of the other engine is different: {difference}")
        memory = self._map(welcome) if self._allow_shared_memory else None
        if memory is None:
            return MessageReader(self._own, connection)
        return SharedMemoryReader(self._own, memory)

    def _map(self, welcome: Welcome) -> SharedCache | None:
        """Return the memory of the other engine; None if this process cannot map it."""
        memory, own = welcome.memory, self._own.shape
        if memory.host != host_id():
            return None
        with self._lock:
            if welcome.engine not in self._mapped:
                mapped = _open_memory(memory, CacheShape(own.num_parts, memory.num_blocks, own.part_bytes))
                if mapped is None:
                    return None
                while len(self._mapped) >= _MAX_MAPPED:
                    self._mapped.pop(next(iter(self._mapped)))  # running fetches keep it mapped
                self._mapped[welcome.engine] = mapped
            return self._mapped[welcome.engine]


def _release(connection: Connection, transfer_id: str) -> None:
    connection.deadline = time.monotonic() + _RELEASE_SECONDS
    with contextlib.suppress(TransferError):  # then the lease ends by itself
        connection.ask(Release(connection.token, transfer_id), Ended)


_MAX_MAPPED = 64
"""Number of engines whose memory stays mapped."""


def _open_memory(memory: Memory, shape: CacheShape) -> SharedCache | None:
    try:
        mapped = SharedCache.open(f"/proc/{memory.pid}/fd/{memory.fd}", shape)
    except (OSError, ValueError):  # another container or user
        return None
    return mapped if os.fstat(mapped.fd).st_ino == memory.inode else None


def _runs(blocks: list[int], targets: list[int]) -> list[tuple[int, int]]:
    """Return ranges of indices in which blocks and targets are consecutive."""
    runs, start = [], 0
    for i in range(1, len(blocks) + 1):
        if (
            i == len(blocks)
            or blocks[i] != blocks[start] + i - start
            or targets[i] != targets[start] + i - start
        ):
            runs.append((start, i))
            start = i
    return runs
