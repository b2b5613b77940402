"""The server's connection to the workers of a queue in NATS: discovery, and messages."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket as sockets

import msgspec

from neso import __version__
from neso.cluster.jetstream.connection import BEAT_SECONDS, ENTRY_SECONDS, Member, NatsConnection
from neso.cluster.jetstream.links import Links
from neso.cluster.messages import Introduce, Leave, Refused, Welcome, encoder

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_LOST_MESSAGES = encoder.encode(Leave("messages were lost"))


class NatsFrontEndSocket:
    """Connects a front end to all workers of a queue; the counterpart of `FrontEndSocket`.

    `digest`: of the model. Workers are found in the bucket.
    """

    def __init__(self, connection: NatsConnection, digest: str) -> None:
        self.connection = connection
        self.name = secrets.token_hex(6)
        self.links = Links(connection, self.name, "server", "worker")
        host = sockets.gethostname()
        self._member = Member(
            kind="server",
            name=self.name,
            host=host,
            pid=os.getpid(),
            model=digest,
            session=self.name,
            version=__version__,
        )
        self._sessions: dict[str, str] = {}
        self._refused: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begin to look for workers. Raises `EngineError` if the queue serves another model."""
        await self.connection.check_model(self._member.model)
        await self.links.open()
        self._tasks = [asyncio.create_task(self._announce()), asyncio.create_task(self._discover())]

    async def receive(self) -> tuple[str, bytes]:
        """Return the name of a worker and an encoded message."""
        name, data = await self.links.receive()
        if data is None:
            self.links.send(name, encoder.encode(Introduce()), alone=True)
            return name, _LOST_MESSAGES
        return name, data

    def send(self, name: str, message: msgspec.Struct) -> bool:
        """Send a message. Returns False if the worker is not connected."""
        if isinstance(message, Refused):
            self._refused[name] = self._sessions.get(name, "")
        start = isinstance(message, Welcome)
        alone = isinstance(message, (Introduce, Refused))
        connected = self.links.send(name, encoder.encode(message), start=start, alone=alone)
        if not connected:
            self.links.forget(name)
        return connected

    def close(self) -> None:
        """Close after sending what is pending, within a few seconds; see `closed`."""
        for task in self._tasks:
            task.cancel()
        self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.links.flush()
        await self.connection.leave(self._member)
        self.links.close()
        await self.connection.close()

    async def closed(self) -> None:
        """Wait until all is closed."""
        if self._closing is not None:
            await self._closing

    async def _announce(self) -> None:
        while True:
            try:
                await self.connection.announce(self._member)
            except Exception as error:
                logger.debug("this server could not be announced: %s", type(error).__name__)
            await asyncio.sleep(BEAT_SECONDS)

    async def _discover(self) -> None:
        """Introduce this server to workers. Its own entry also changes, so a watcher without changes is broken."""
        while True:
            try:
                watcher = await self.connection.bucket.watchall()
                try:
                    while True:
                        entry = await watcher.updates(timeout=3 * BEAT_SECONDS)  # type: ignore[no-untyped-call]
                        if entry is not None and entry.value and entry.key.startswith("worker."):
                            self._introduce(msgspec.json.decode(entry.value, type=Member))
                finally:
                    await watcher.stop()  # type: ignore[no-untyped-call]
            except msgspec.MsgspecError as error:
                logger.warning("an entry of the bucket of workers cannot be read: %s", error)
            except Exception as error:
                logger.debug("watching the workers is repeated: %s", type(error).__name__)
            await asyncio.sleep(_RETRY_SECONDS)

    def _introduce(self, worker: Member) -> None:
        started = self._sessions.get(worker.name) != worker.session
        self._sessions[worker.name] = worker.session
        if self._refused.get(worker.name) == worker.session:
            return
        if started or self.links.silence(worker.name) > ENTRY_SECONDS:
            self.send(worker.name, Introduce())
