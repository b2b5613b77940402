"""Control channel between the ranks of a model and their supervisor.

A stream socket per rank with length-prefixed msgpack messages: a Unix socket if all ranks are on this host, TCP if not.
It carries no data of steps, so it works while ranks load, hang, or wait for each other in MPI.
After the handshake (`neso.engine.parallel.handshake`):

    rank        supervisor
             <- Start         to all ranks, when all have started
    Loaded   ->
             <- Connect       to all ranks, when all have loaded
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
import time
from pathlib import Path

import msgspec

_LENGTH = struct.Struct("<I")
MAX_MESSAGE = 1 << 26
"""Maximum size of a message in bytes; larger ones close the connection."""
MAX_UNKNOWN_MESSAGE = 1 << 16
"""Maximum size of a message of a connection that has not proven to be a rank."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a rank: its number, process and host. `cpus`: the logical CPUs that it may use.

    `nonce`: random bytes for the handshake.
    """

    rank: int
    size: int
    pid: int
    host: str
    cpus: list[int]
    version: str
    library: str
    nonce: bytes


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Proof that the rank knows the secret."""

    proof: bytes


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The rank has loaded its weights.

    - checkpoint: checksum of the files that describe the model
    - isa: instruction set of the kernels
    - block_bytes: size of a KV cache block; free_memory: bytes available for steps and the KV cache
    - shares_memory: that memory is the host's, for all of its ranks; otherwise the rank's own GPU's
    - address: where this rank listens for the connections of the ranks that receive its plans
    """

    checkpoint: str
    isa: str
    block_bytes: int
    free_memory: int
    shares_memory: bool = True
    address: str = ""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank ends because of an error."""

    message: str


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Heartbeat."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The rank ends as planned."""


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """Random bytes of the supervisor, and the proof that it knows the secret."""

    nonce: bytes
    proof: bytes


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Load the weights.

    - config: the `EngineConfig` as JSON
    - engine_address: ZeroMQ address of the engine's client, for rank 0
    - cpus: the logical CPUs of the rank; empty: those that it has
    """

    config: str
    engine_address: str
    cpus: list[int]


class Connect(msgspec.Struct, frozen=True, tag="connect"):
    """All ranks have loaded: connect to each other.

    - plan_address: where rank 0 sends its plans; token: by which rank 0 recognizes the other ranks
    - block_bytes: size of the largest KV cache block of a rank; free_memory: bytes of the rank with the least memory
    """

    plan_address: str
    token: str
    block_bytes: int
    free_memory: int


FromRank = Hello | Answer | Loaded | Failed | Alive | Leaving
ToRank = Challenge | Start | Connect

_encode = msgspec.msgpack.Encoder().encode
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class ConnectionClosed(ConnectionError):
    """The other side has closed the connection, or has ended."""


class Stream:
    """Sends and receives length-prefixed messages on a connected stream socket. Sending is thread-safe."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._lock = threading.Lock()

    def send(self, message: bytes) -> None:
        """Send a message. Raises `OSError`."""
        with self._lock:
            if len(message) < 1 << 16:
                self.socket.sendall(_LENGTH.pack(len(message)) + message)
            else:
                self.socket.sendall(_LENGTH.pack(len(message)))
                self.socket.sendall(message)

    def receive(self, limit: int = (1 << 32) - 1) -> bytes:
        """Wait for a message. Raises `ConnectionClosed`, `OSError`, `TimeoutError`."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > limit:
            raise ConnectionClosed(f"a message of {length} bytes is too long")
        return bytes(self._read(length))

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            received = self.socket.recv_into(view)
            if not received:
                raise ConnectionClosed("the connection was closed")
            view = view[received:]
        return data

    def close(self) -> None:
        self.socket.close()


class RankConnection(Stream):
    """A rank's side of the control channel."""

    def tell(self, message: FromRank) -> None:
        """Send a message to the supervisor. Raises `OSError`."""
        self.send(_encode(message))

    def next(self) -> ToRank:
        """Wait for the supervisor's next message. Raises `ConnectionClosed`, `OSError`."""
        return _to_rank.decode(self.receive(MAX_MESSAGE))


class SupervisorConnection(Stream):
    """The supervisor's side of the control channel to one rank. Reads without blocking, with `feed`.

    `limit`: maximum size of a message in bytes.
    """

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(connected)
        self.limit = MAX_UNKNOWN_MESSAGE
        self._buffer = bytearray()
        connected.settimeout(5.0)  # for sending; a rank that does not read hangs

    def tell(self, message: ToRank) -> None:
        """Send a message to the rank. Raises `OSError`."""
        self.send(_encode(message))

    def feed(self) -> list[FromRank]:
        """Read what has arrived, when the socket is readable; returns the complete messages.

        Raises `ConnectionClosed`, `OSError`, `msgspec.MsgspecError`.
        """
        received = self.socket.recv(1 << 16)
        if not received:
            raise ConnectionClosed("the connection was closed")
        self._buffer += received
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.limit:
                raise ConnectionClosed(f"a message of {length} bytes is too long")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.append(_from_rank.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages


def listen(address: str, backlog: int = 128) -> socket.socket:
    """Listen at a path, whose directory is created, or at HOST:PORT (port 0: any free port).

    Raises `OSError`, `ValueError`.
    """
    if _is_path(address):
        path = Path(address)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(path.parent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _remove_stale(path)
            listener.bind(address)
            listener.listen(backlog)
        except OSError:
            listener.close()
            raise
        return listener
    host, port = split_address(address)
    family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    return socket.create_server((host, port), family=family, backlog=backlog)


def close_listener(listener: socket.socket) -> None:
    """Close a listener, and remove its path."""
    if listener.fileno() < 0:
        return
    name = listener.getsockname()
    listener.close()
    if isinstance(name, str):
        Path(name).unlink(missing_ok=True)


def connect(address: str, timeout: float) -> socket.socket:
    """Connect to a listener, which may not listen yet. Raises `OSError` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            if _is_path(address):
                _check_private(Path(address).parent)
                connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    connected.connect(address)
                except OSError:
                    connected.close()
                    raise
                return connected
            left = max(0.1, deadline - time.monotonic())
            connected = socket.create_connection(split_address(address), timeout=left)
            connected.settimeout(None)
            return connected
        except PermissionError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises `ValueError`."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"'{address}' is not HOST:PORT")
    return host.strip("[]"), int(port)


def _is_path(address: str) -> bool:
    return Path(address).is_absolute()


def _check_private(directory: Path) -> None:
    """Raise `PermissionError` unless only this user can create sockets in a directory."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{directory} is not a directory of this user that others cannot write to")


def _remove_stale(path: Path) -> None:
    """Remove the socket of a process that has ended without closing it."""
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
