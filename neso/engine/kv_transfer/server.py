"""KV server: a thread that answers the questions of other engines about this engine's exports."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from neso.engine.kv_transfer.exports import ExportTable
from neso.engine.kv_transfer.format import KvFormat
from neso.engine.kv_transfer.nixl import NixlMemory
from neso.engine.kv_transfer.protocol import (
    Content,
    Ended,
    Epochs,
    Hello,
    KvAddress,
    Memory,
    Pull,
    Query,
    Read,
    Refused,
    Release,
    Reply,
    Welcome,
    encoder,
    host_id,
    query_decoder,
)
from neso.engine.runners.shared_cache import SharedCache
from neso.engine.wake_up import WakeUp

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Time after which a `Pull` is answered although nothing has changed."""
_WAKE_AGAIN_SECONDS = 0.05
MAX_QUERY_BYTES = 1 << 20
MAX_READ_BYTES = 16 << 20
MAX_WAITING = 1024
"""Number of `Pull` queries that wait at a time; further ones are answered at once."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A `Pull` that waits for progress."""

    reader: bytes
    query: Pull
    deadline: float


class KvServer:
    """Serves the blocks of `cache` that `exports` names.

    Readers must send the token of `address`, which therefore must be kept secret. `wake` is called when a lease has
    ended. Raises `OSError` if `host` cannot be bound.

    - host: name or address of this host at which engines on other hosts connect; None for engines of this host only
    - nixl: of the agent with which `cache` can be read
    """

    def __init__(
        self,
        cache: SharedCache,
        block_format: KvFormat,
        exports: ExportTable,
        host: str | None = None,
        nixl: NixlMemory | None = None,
    ) -> None:
        self._cache = cache
        self._exports = exports
        self._token = secrets.token_hex(16)
        name = secrets.token_hex(8)
        status = os.fstat(cache.fd)
        self._welcome = Welcome(
            name,
            block_format,
            Memory(host_id(), os.getpid(), cache.fd, status.st_ino, cache.shape.num_blocks),
            nixl,
        )
        self._changed = WakeUp()
        self._closing = False
        self._wake: Callable[[], None] = lambda: None
        self._waiting: list[_Waiting] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUERY_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            if host is None:
                endpoint = f"ipc://@neso-kv-{name}"
                self._socket.bind(endpoint)
            else:
                bracketed = f"[{host}]" if ":" in host else host
                self._socket.setsockopt(zmq.IPV6, int(":" in host))
                endpoint = f"tcp://{bracketed}:{self._socket.bind_to_random_port(f'tcp://{bracketed}')}"
        except (zmq.ZMQError, zmq.ZMQBindError) as error:
            self._context.destroy()
            raise OSError(f"cannot listen at {host}: {error}") from None
        self.address = str(KvAddress(endpoint, self._token))
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-server")
        self._thread.start()

    def set_wake(self, wake: Callable[[], None]) -> None:
        """Set the function that is called when a lease has ended."""
        self._wake = wake

    def notify(self) -> None:
        """Look for progress of the exports. Thread-safe."""
        self._changed.set()

    def close(self) -> None:
        """End the thread and close the socket."""
        self._closing = True
        self._changed.set()
        self._thread.join()
        self._context.destroy()
        self._changed.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._changed, zmq.POLLIN)
        while not self._closing:
            try:
                poller.poll(self._milliseconds_until_next())
                self._changed.clear()
                self._receive()
                self._answer_waiting()
                if self._exports.has_ended():
                    self._wake()
            except Exception:
                logger.exception("the KV server failed to answer")

    def _milliseconds_until_next(self) -> int:
        times = [waiting.deadline for waiting in self._waiting]
        end = self._exports.next_end()
        if end is not None:  # if it has passed, the engine was woken already, and is busy with a step
            times.append(max(end, time.monotonic() + _WAKE_AGAIN_SECONDS))
        seconds = min(times, default=time.monotonic() + 60) - time.monotonic()
        return max(0, min(60_000, int(seconds * 1000) + 1))

    def _receive(self) -> None:
        for _ in range(64):  # then look at the waiting queries again
            try:
                reader, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                query = query_decoder.decode(frames[-1]) if frames else None
            except msgspec.MsgspecError as error:
                self._reply(reader, Refused(f"invalid query: {error}"))
                continue
            if query is not None:
                self._answer(reader, query)

    def _answer(self, reader: bytes, query: Query) -> None:
        if not hmac.compare_digest(query.token.encode(), self._token.encode()):
            self._reply(reader, Refused("the token is wrong"))
            return
        match query:
            case Hello():
                self._reply(reader, self._welcome)
            case Pull():
                self._waiting.append(_Waiting(reader, query, time.monotonic() + POLL_SECONDS))
            case Read(blocks=blocks) | Epochs(blocks=blocks):
                self._read(reader, blocks, with_content=isinstance(query, Read))
            case Release(transfer_id=transfer_id):
                self._exports.release(transfer_id)
                self._reply(reader, Ended("released"))

    def _answer_waiting(self) -> None:
        now = time.monotonic()
        crowded = len(self._waiting) > MAX_WAITING
        still_waiting = []
        for waiting in self._waiting:
            state = self._exports.progress(waiting.query.transfer_id, waiting.query.have)
            news = isinstance(state, Ended) or state.complete or state.blocks
            if news or crowded or waiting.deadline <= now:
                self._reply(waiting.reader, state)
            else:
                still_waiting.append(waiting)
        self._waiting = still_waiting

    def _read(self, reader: bytes, blocks: list[int], *, with_content: bool) -> None:
        shape = self._cache.shape
        limit = max(MAX_READ_BYTES, shape.block_bytes)
        if with_content and not 0 < len(blocks) * shape.block_bytes <= limit:
            self._reply(reader, Refused(f"can read 1 to {MAX_READ_BYTES} bytes at a time"))
        elif not all(0 <= block < shape.num_blocks for block in blocks):
            self._reply(reader, Refused("there is no such block"))
        else:
            content = self._cache.blocks[:, blocks] if with_content else None
            epochs = self._cache.epochs[blocks].tolist()
            self._reply(reader, Content(epochs), content)

    def _reply(self, reader: bytes, reply: Reply, content: npt.NDArray[np.uint8] | None = None) -> None:
        frames: list[Any] = [reader, encoder.encode(reply)]
        if content is not None:
            frames.append(content.reshape(-1))
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:  # the reader has gone, or does not read
            logger.debug("no reply to a reader: %s", error)
