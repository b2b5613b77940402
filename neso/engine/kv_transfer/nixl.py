"""Reads blocks of other engines with NIXL, over whatever connects the hosts: TCP, RDMA, shared memory."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from neso.engine.kv_transfer.config import Via
from neso.engine.runners.shared_cache import CacheShape, SharedCache, block_runs

logger = logging.getLogger(__name__)

_MODULES = ("nixl_cu12._bindings", "nixl_cu13._bindings")
MIN_PIECE_BYTES = 1 << 20
_PROGRESS_MICROSECONDS = 1000
"""Time between two looks of NIXL's thread for progress. Without one, the thread would keep a core busy."""


class NixlError(Exception):
    """NIXL is missing, or a transfer has failed; the message is for the log and the client."""


class NixlMemory(msgspec.Struct, frozen=True, array_like=True):
    """Where the agents of other engines find a cache.

    `agent`: metadata of NIXL. `address`: of the first block in the memory of its process.
    """

    agent: bytes
    address: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class Peer:
    """The NIXL agent of another engine. A broken one is removed after its last read; the next read connects again.

    `piece_bytes`: size of a read, by the speed of the last ones.
    """

    engine: str
    name: str
    memory: NixlMemory
    num_users: int = 0
    broken: bool = False
    piece_bytes: int = MIN_PIECE_BYTES


class NixlAgent:
    """The NIXL agent of an engine, with which its cache can be read and it reads those of others. Thread-safe.

    `name`: must be unique among all engines; `cache`: what `memory` describes.
    Raises `NixlError` if NIXL is not installed or does not start.
    """

    def __init__(self, name: str, cache: SharedCache) -> None:
        self._nixl = _import()
        self.cache = cache
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}  # by the name of the engine
        self.closing = False
        try:
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = _PROGRESS_MICROSECONDS
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
            self._agent = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
            self._agent.registerMem(self._region(cache), [])
            metadata = self._agent.getLocalMD()
        except Exception as error:
            raise NixlError(f"NIXL does not start: {error}") from error
        self.memory = NixlMemory(metadata, cache.blocks.ctypes.data, cache.shape.num_blocks)

    def connect(self, engine: str, memory: NixlMemory) -> Peer:
        """Return the agent of an engine; `disconnect` must follow. Raises `NixlError`."""
        with self._lock:
            peer = self._peers.get(engine)
            if peer is None:
                try:
                    name = self._agent.loadRemoteMD(memory.agent)
                except Exception as error:
                    raise NixlError(f"NIXL does not connect: {error}") from error
                self._peers[engine] = peer = Peer(engine, os.fsdecode(name), memory)
            elif peer.broken:
                raise NixlError("the connection was lost, and other transfers still use it")
            peer.num_users += 1
            return peer

    def disconnect(self, peer: Peer) -> None:
        """End the use of a peer."""
        with self._lock:
            peer.num_users -= 1
            if peer.broken and not peer.num_users:
                del self._peers[peer.engine]
                with contextlib.suppress(Exception):  # NIXL has forgotten it by itself
                    self._agent.invalidateRemoteMD(peer.name)

    def register(self, cache: SharedCache) -> None:
        """Let `read` write to another cache of this process; `unregister` must follow. Raises `NixlError`."""
        try:
            self._agent.registerMem(self._region(cache), [])
        except Exception as error:
            raise NixlError(f"NIXL cannot use memory: {error}") from error

    def unregister(self, cache: SharedCache) -> None:
        """End the use of a cache, to which nothing is written any more."""
        with contextlib.suppress(Exception):  # the agent is closed
            self._agent.deregisterMem(self._region(cache), [])

    def _region(self, cache: SharedCache) -> Any:
        region = (cache.blocks.ctypes.data, cache.shape.cache_bytes, 0, "")
        return self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [region])

    def read(self, peer: Peer, blocks: list[int], targets: list[int], own: SharedCache) -> NixlRead:
        """Begin to copy blocks of a peer to blocks of `own`, which has the same parts. Raises `NixlError`.

        own: the cache of this agent, or a registered one
        """
        shape = own.shape
        sources, owns, counts = zip(*block_runs(blocks, targets), strict=True)
        theirs = CacheShape(shape.num_parts, peer.memory.num_blocks, shape.part_bytes)
        try:
            handle = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._descriptors(own.blocks.ctypes.data, shape, owns, counts),
                self._descriptors(peer.memory.address, theirs, sources, counts),
                peer.name,
                b"",
                [],
            )
        except Exception as error:
            peer.broken = True
            raise NixlError(f"NIXL cannot read: {error}") from error
        return NixlRead(self, peer, handle)

    def close(self) -> None:
        """Disconnect; nothing is written to the cache after this. `closing` must have ended all waits for reads."""
        self._peers.clear()
        self._agent = None

    def _descriptors(
        self, address: int, shape: CacheShape, firsts: tuple[int, ...], counts: tuple[int, ...]
    ) -> Any:
        """Return the memory of runs of blocks, by their first blocks and lengths, in each part of a cache."""
        parts = np.arange(shape.num_parts, dtype=np.uint64)[:, None] * np.uint64(shape.num_blocks)
        table: npt.NDArray[np.uint64] = np.zeros((shape.num_parts, len(firsts), 3), np.uint64)
        table[..., 0] = np.uint64(address) + (parts + np.array(firsts, np.uint64)) * np.uint64(
            shape.part_bytes
        )
        table[..., 1] = np.array(counts, np.uint64) * np.uint64(shape.part_bytes)
        return self._nixl.nixlXferDList(self._nixl.DRAM_SEG, table.reshape(-1, 3))


class NixlRead:
    """A running read. Its targets must stay reserved until `has_ended`: NIXL cannot stop it."""

    def __init__(self, agent: NixlAgent, peer: Peer, handle: Any) -> None:
        self._agent, self._peer, self._handle = agent, peer, handle
        self._error = ""
        self._ended = False
        self._update(lambda: agent._agent.postXferReq(handle, b""))

    def has_ended(self) -> bool:
        """Whether the read has ended. Raises `NixlError` if it has failed."""
        if not self._ended:
            self._update(lambda: self._agent._agent.getXferStatus(self._handle))
        if self._error:
            raise NixlError(self._error)
        return self._ended

    def _update(self, ask: Callable[[], Any]) -> None:
        nixl = self._agent._nixl
        try:
            state = ask()
            if state == nixl.NIXL_IN_PROG:
                return
            if state != nixl.NIXL_SUCCESS:
                self._error = f"NIXL: {state}"
        except Exception as error:
            self._error = f"NIXL: {error}"
        self._ended = True
        self._peer.broken |= bool(self._error)
        with contextlib.suppress(Exception):
            self._agent._agent.releaseXferReq(self._handle)


def open_nixl(cache: SharedCache, via: Via, *, wanted: bool) -> NixlAgent | None:
    """Return the agent of an engine; None if `via` or `wanted` says that it needs none, or NIXL is not installed.

    Raises `NixlError` if `via` is "nixl" and there is no agent.
    """
    if via != "nixl" and not (via == "auto" and wanted):
        return None
    try:
        return NixlAgent(secrets.token_hex(8), cache)
    except NixlError as error:
        if via == "nixl":
            raise
        logger.info("KV transfers between hosts use messages: %s", error)
        return None


def _import() -> Any:
    # UCX must not take SIGHUP for its debug mode.
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    reasons = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise NixlError(f"NIXL is not installed (pip install 'neso-server[nixl]'): {'; '.join(reasons)}")
