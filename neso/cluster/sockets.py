"""Sockets between front ends and workers.

Connections to a tcp:// address are encrypted and authenticated with CURVE. The server's key pair is derived from a
secret token, so only those who know the token can connect; the keys of workers are random.
"""

from __future__ import annotations

import asyncio
import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from neso.cluster.messages import encoder
from neso.engine.cluster_config import MIN_TOKEN_LENGTH
from neso.engine.errors import EngineError

_SALT = b"neso worker connections"


def read_token(path: str | None) -> str | None:
    """Return the content of a token file without surrounding white space. Raises `EngineError`."""
    if path is None:
        return None
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError(f"the token file cannot be read: {error}") from None
    if len(token) < MIN_TOKEN_LENGTH:
        raise EngineError(f"the token in {path} has less than {MIN_TOKEN_LENGTH} characters")
    return token


@lru_cache(maxsize=8)
def _server_secret(token: str) -> bytes:
    key = hashlib.scrypt(token.encode(), salt=_SALT, n=2**14, r=8, p=1, dklen=32)
    return z85.encode(key)


def curve_server(socket: zmq.Socket[Any], token: str) -> None:
    """Let only those connect who know the token. Call before `bind`."""
    socket.curve_secretkey = _server_secret(token)
    socket.curve_server = True


def curve_client(socket: zmq.Socket[Any], token: str) -> None:
    """Encrypt connections to a `curve_server`. Call before `connect`."""
    socket.curve_serverkey = zmq.curve_public(_server_secret(token))
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


class FrontEndSocket:
    """Listens for workers at one or more addresses. A worker is known by the name that it has chosen."""

    def __init__(self) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._sending: set[asyncio.Future[object]] = set()

    def listen(self, address: str, token: str | None = None) -> str:
        """Listen at an address; returns it with the port that was chosen. Raises `EngineError`.

        A socket has one way of authentication, so tcp:// addresses need a socket of their own.
        """
        if token is not None:
            curve_server(self._socket, token)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise EngineError(f"cannot listen for workers at {address}: {error}") from None
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def receive(self) -> tuple[str, bytes]:
        """Return the name of a worker and an encoded message."""
        while True:
            name, *parts = await self._socket.recv_multipart()
            if len(parts) == 1:
                return name.decode(errors="replace"), parts[0]

    def send(self, name: str, message: msgspec.Struct) -> bool:
        """Send a message. Returns False if the worker is not connected."""
        try:
            sending: asyncio.Future[object] = asyncio.ensure_future(
                self._socket.send_multipart([name.encode(), encoder.encode(message)])
            )
        except zmq.ZMQError:
            return False
        if not sending.done():
            self._sending.add(sending)
            sending.add_done_callback(self._sent)
            return True
        return sending.exception() is None

    def _sent(self, sending: asyncio.Future[object]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            sending.exception()  # the worker has disconnected, which the next ping reports

    def close(self) -> None:
        """Close after sending what is pending, within a second."""
        self._socket.close(linger=1000)


def listen_for_workers(
    directory: Path, address: str | None, token: str | None
) -> tuple[list[FrontEndSocket], list[str]]:
    """Listen for the workers of this host at a socket in `directory`, and for others at `address` if it is given.

    Returns the sockets and their addresses, with the ports that were chosen. Raises `EngineError`.
    """
    sockets = [FrontEndSocket()]
    try:
        addresses = [sockets[0].listen(f"ipc://{directory}/front-end")]
        if address is not None:
            sockets.append(FrontEndSocket())
            addresses.append(sockets[1].listen(address, token))
    except EngineError:
        for socket in sockets:
            socket.close()
        raise
    return sockets, addresses


class WorkerSocket:
    """A worker's connection to a front end. It is restored by itself when it breaks."""

    def __init__(self, name: str, address: str, token: str | None) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.IDENTITY, name.encode())
        if token is not None:
            curve_client(self._socket, token)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise EngineError(f"cannot connect to {address}: {error}") from None

    async def receive(self) -> bytes:
        """Return an encoded message of the front end."""
        return await self._socket.recv()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; it is sent when the front end is connected."""
        self._socket.send(encoder.encode(message))

    def close(self, linger: float = 1.0) -> None:
        """Close after sending what is pending, within `linger` seconds."""
        self._socket.close(linger=int(linger * 1000))
