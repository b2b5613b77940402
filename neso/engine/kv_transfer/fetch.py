"""Fetches blocks from the KV server of another engine, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass, field

import zmq

from neso.engine.core.sequence import CacheToken
from neso.engine.core.stats import FallbackReason
from neso.engine.kv_transfer.config import Via
from neso.engine.kv_transfer.connection import Connection, TransferError
from neso.engine.kv_transfer.format import KvFormat, prefix_digest
from neso.engine.kv_transfer.nixl import NixlAgent
from neso.engine.kv_transfer.protocol import Ended, Progress, Pull, Release
from neso.engine.kv_transfer.readers import Opened, Readers
from neso.engine.runners.shared_cache import SharedCache

logger = logging.getLogger(__name__)

_RELEASE_SECONDS = 1.0
"""Time that a reader waits for the answer to `Release`."""


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
    - error, reason: why not all have; empty if the other engine does not have more
    - num_bytes, seconds: of the copies; transport: see `KvImported`

    `ended`: set when nothing is written to the targets any more, which can be later: NIXL cannot stop a copy.
    """

    address: str
    transfer_id: str
    prefix: Prefix
    first: int
    targets: list[int]
    deadline: float
    cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    num_blocks: int = 0
    error: str = ""
    reason: FallbackReason = "error"
    num_bytes: int = 0
    seconds: float = 0.0
    transport: str = ""


class Fetcher:
    """Runs fetches into the blocks of `own`. `nixl`: the agent of this engine, which is closed with the fetcher."""

    def __init__(
        self, own: SharedCache, own_format: KvFormat, via: Via = "auto", nixl: NixlAgent | None = None
    ) -> None:
        self._format = own_format
        self._readers = Readers(own, own_format, via, nixl)
        self._nixl = nixl
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4096)

    def run(self, fetch: Fetch) -> None:
        """Fetch blocks; the result is in `fetch`. Never raises."""
        try:
            connection = Connection(self._context, fetch.address, fetch.deadline, lambda: fetch.cancelled)
            try:
                opened = self._readers.open(connection)
                fetch.transport = opened.reader.transport
                try:
                    self._run(fetch, connection, opened)
                    fetch.done.set()
                    if not fetch.cancelled:
                        _release(connection, fetch.transfer_id)
                except TransferError as error:
                    fetch.error, fetch.reason = str(error), error.reason
                finally:
                    fetch.done.set()
                    opened.reader.close()
            finally:
                connection.close()
        except TransferError as error:
            fetch.error, fetch.reason = str(error), error.reason
        except Exception as error:
            logger.exception("a KV transfer failed")
            fetch.error = f"{type(error).__name__}: {error}"
        finally:
            fetch.done.set()
            fetch.ended.set()

    def release(self, address: str, transfer_id: str) -> None:
        """End the lease of an export that is not needed. Never raises."""
        with contextlib.suppress(TransferError, zmq.ZMQError):
            connection = Connection(self._context, address, time.monotonic())
            try:
                _release(connection, transfer_id)
            finally:
                connection.close()

    def stop(self) -> None:
        """Let fetches that wait for the end of a copy return; their targets may be written until `close`."""
        if self._nixl is not None:
            self._nixl.closing = True

    def close(self) -> None:
        """Close the sockets; no fetch may be running."""
        self._readers.close()
        if self._nixl is not None:
            self._nixl.close()
        self._context.destroy(linger=0)

    def _run(self, fetch: Fetch, connection: Connection, opened: Opened) -> None:
        own_size, size = self._format.block_size, opened.theirs.block_size
        first = fetch.first * own_size
        have = first // size
        end = -(-(first + len(fetch.targets) * own_size) // size)
        while have < end and not fetch.cancelled:
            state = connection.ask(Pull(connection.token, fetch.transfer_id, have), Progress)
            if isinstance(state, Ended):
                raise TransferError(state.reason, "ended")
            if state.blocks:
                self._check(fetch, state)
            blocks, epochs = state.blocks[: end - have], state.epochs[: end - have]
            for start in range(0, len(blocks), opened.max_blocks):
                part = slice(start, start + opened.max_blocks)
                intact = self._copy(fetch, opened, have, blocks[part], epochs[part])
                have += intact
                fetch.num_blocks = min(len(fetch.targets), max(0, have * size - first) // own_size)
                if intact < len(blocks[part]):
                    break
            if state.complete and have >= state.num_tokens // size:
                break

    def _copy(self, fetch: Fetch, opened: Opened, have: int, blocks: list[int], epochs: list[int]) -> int:
        """Copy the other engine's blocks of the sequence from `have` on; returns how many have their content."""
        started = time.perf_counter()
        if opened.converter is None:
            targets = fetch.targets[have - fetch.first :][: len(blocks)]
        else:
            targets = list(range(len(blocks)))
        after = opened.reader.read(blocks, targets)
        # Blocks whose epoch has changed were given to another sequence, maybe before they were read.
        intact = next((i for i, epoch in enumerate(epochs) if after[i] != epoch), len(blocks))
        if opened.converter is not None:
            first = fetch.first * self._format.block_size
            opened.converter.write(have, intact, first, fetch.targets)
        fetch.seconds += time.perf_counter() - started
        fetch.num_bytes += intact * opened.theirs.block_bytes
        return intact

    def _check(self, fetch: Fetch, state: Progress) -> None:
        """Check that an export has the content that the request needs. Raises `TransferError`."""
        tokens = fetch.prefix.tokens[: state.num_tokens]
        if state.digest != prefix_digest(fetch.prefix.identity, tokens):
            raise TransferError("the export has other tokens than the request, or another adapter")


def _release(connection: Connection, transfer_id: str) -> None:
    connection.deadline = time.monotonic() + _RELEASE_SECONDS
    with contextlib.suppress(TransferError):  # then the lease ends by itself
        connection.ask(Release(connection.token, transfer_id), Ended)
