"""Accepts TLS connections: their handshakes count as connections and have a time limit."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from neso.frontends.transport.tcp import Admission, ConnectionLimits

logger = logging.getLogger(__name__)

_MAX_ACCEPTED = (
    16  # connections accepted per turn of the event loop: each handshake takes about a millisecond
)
_RETRY = 1.0  # seconds after the process has run out of file descriptors


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """`handshake_timeout`, `shutdown_timeout`: seconds."""

    context: ssl.SSLContext
    handshake_timeout: float
    shutdown_timeout: float


class TlsListener:
    """Listens like the server of `loop.create_server`, which counts connections only after their handshake.

    `protocol`: creates the protocol of an admitted connection; the admission is the protocol's when its
    `connection_made` is called. Connections beyond the limits are closed without a handshake.
    """

    def __init__(
        self, protocol: Callable[[Admission], asyncio.Protocol], limits: ConnectionLimits, tls: TlsOptions
    ) -> None:
        self._protocol = protocol
        self._limits = limits
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self.sockets: list[socket.socket] = []

    async def listen(self, host: str, port: int, backlog: int, reuse_port: bool) -> None:
        """Bind and accept connections. Raises `OSError` and `OverflowError`."""
        found = await self._loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                self.sockets.append(
                    socket.create_server(address[:2], family=family, backlog=backlog, reuse_port=reuse_port)
                )
        except OSError:
            self.close()
            raise
        for each in self.sockets:
            each.setblocking(False)
            self._loop.add_reader(each, self._accept, each)

    def close(self) -> None:
        """Stop accepting connections, and end the handshakes in progress."""
        for each in self.sockets:
            self._loop.remove_reader(each)
            each.close()
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the handshakes have ended."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("cannot accept a connection: %s", error)
                self._loop.remove_reader(listening)
                self._loop.call_later(_RETRY, self._resume, listening)
                return
            admission = self._limits.admit_host(str(address[0]))
            if admission is None:
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._handshake(connection, admission))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)

    async def _handshake(self, connection: socket.socket, admission: Admission) -> None:
        tls = self._tls
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol(admission),
                connection,
                ssl=tls.context,
                ssl_handshake_timeout=tls.handshake_timeout,
                ssl_shutdown_timeout=tls.shutdown_timeout,
            )
        except (OSError, asyncio.TimeoutError) as error:  # ssl.SSLError is an OSError
            admission.release()
            logger.debug("TLS handshake failed: %s", error)
        except asyncio.CancelledError:
            admission.release()
            raise
