"""Messages between a server and its workers over core NATS, which may lose messages but keeps their order.

Each message has a number, so the receiver notices when some are lost: the two sides then begin again. Messages larger
than the server allows are sent in parts. NATS reports a message that nobody receives at once.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from neso.cluster.jetstream.connection import NatsConnection

if TYPE_CHECKING:
    from nats.aio.msg import Msg

logger = logging.getLogger(__name__)

_HEADER = struct.Struct(">IB")  # number of the message, flags
_MORE, _START, _ALONE = 1, 2, 4
_RESERVE = 1024
"""Bytes of the maximum payload that are left for headers."""
UNREACHABLE_SECONDS = 2.0
"""A peer has gone when nobody has received its messages for this long; it may be connecting to NATS again."""


@dataclass(slots=True)
class _Peer:
    """`sent`, `received`: next numbers; `received` is None until the peer has begun. `parts`: of a large message."""

    sent: int = 0
    received: int | None = None
    parts: list[bytes] = field(default_factory=list)
    heard: float = 0.0
    unreachable: float | None = None


class Links:
    """Messages to and from peers. `inbound`, `outbound`: subjects without the names of this side and the peer.

    `name`: of this side. Messages of the peer P arrive at `inbound.name.P`, and are sent to `outbound.P.name`.
    """

    def __init__(self, connection: NatsConnection, name: str, inbound: str, outbound: str) -> None:
        self._nats, self._name = connection, name
        self._inbound = f"{connection.prefix}.{inbound}.{name}"
        self._outbound = f"{connection.prefix}.{outbound}"
        self._bounce = connection.client.new_inbox()
        self._peers: dict[str, _Peer] = {}
        self._arrived: asyncio.Queue[tuple[str, bytes | None]] = asyncio.Queue()
        self._outgoing: asyncio.Queue[tuple[str, bytes, str]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._sender = asyncio.create_task(self._send_all())

    async def open(self) -> None:
        """Subscribe."""
        for subject, receive in ((self._inbound, self._receive_one), (self._bounce, self._bounced)):
            await self._nats.client.subscribe(
                f"{subject}.*", cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
            )

    async def receive(self) -> tuple[str, bytes | None]:
        """Return a peer and its message; None: messages of the peer were lost."""
        return await self._arrived.get()

    def send(self, peer: str, data: bytes, *, start: bool = False, alone: bool = False) -> bool:
        """Send a message. Returns False if the peer has gone.

        `start`: the first message, numbers begin again; `alone`: outside of the numbers.
        """
        state = self._peers.setdefault(peer, _Peer())
        if start:
            state.sent = 0
        size = self._nats.client.max_payload - _RESERVE
        parts = [data[offset : offset + size] for offset in range(0, len(data), size)] or [b""]
        for index, part in enumerate(parts):
            flags = _MORE if index < len(parts) - 1 else 0
            flags |= (_START if start and index == 0 else 0) | (_ALONE if alone else 0)
            message = _HEADER.pack(state.sent, flags) + part
            self._outgoing.put_nowait((f"{self._outbound}.{peer}.{self._name}", message, peer))
            if not alone:
                state.sent = (state.sent + 1) & 0xFFFFFFFF
        since = state.unreachable
        return since is None or self._loop.time() - since < UNREACHABLE_SECONDS

    def silence(self, peer: str) -> float:
        """Return the seconds since the last message of a peer."""
        state = self._peers.get(peer)
        return self._loop.time() - state.heard if state is not None else float("inf")

    def forget(self, peer: str) -> None:
        """Forget a peer that has gone."""
        self._peers.pop(peer, None)

    async def flush(self) -> None:
        """Wait until the NATS client has all queued messages, at most one second."""
        try:
            await asyncio.wait_for(self._outgoing.join(), 1)
        except asyncio.TimeoutError:
            logger.debug("%d messages were not sent", self._outgoing.qsize())

    def close(self) -> None:
        """Stop sending."""
        self._sender.cancel()

    async def _send_all(self) -> None:
        while True:
            subject, data, peer = await self._outgoing.get()
            try:
                await self._nats.client.publish(subject, data, reply=f"{self._bounce}.{peer}")
            except Exception as error:
                logger.debug("a message for '%s' is lost: %s", peer, type(error).__name__)
            self._outgoing.task_done()

    async def _bounced(self, message: Msg) -> None:
        state = self._peers.get(message.subject.rpartition(".")[2])
        if state is not None and state.unreachable is None:
            state.unreachable = self._loop.time()

    async def _receive_one(self, message: Msg) -> None:
        peer = message.subject.rpartition(".")[2]
        if len(message.data) < _HEADER.size:
            return
        state = self._peers.setdefault(peer, _Peer())
        state.heard, state.unreachable = self._loop.time(), None
        number, flags = _HEADER.unpack_from(message.data)
        part = message.data[_HEADER.size :]
        if not flags & _ALONE:
            if flags & _START:
                state.received = number
                state.parts.clear()
            if state.received is not None and number != state.received:
                state.received = None
                state.parts.clear()
                self._arrived.put_nowait((peer, None))
                return
            if state.received is not None:
                state.received = (number + 1) & 0xFFFFFFFF
        if flags & _MORE:
            state.parts.append(part)
            return
        if state.parts and not flags & _ALONE:
            part = b"".join((*state.parts, part))
            state.parts.clear()
        self._arrived.put_nowait((peer, part))
