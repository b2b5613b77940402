"""TCP and TLS settings shared by the servers, and limits on the number of connections."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections import Counter
from dataclasses import dataclass
from typing import Any


def tls_arguments(
    context: ssl.SSLContext | None, handshake_timeout: float, shutdown_timeout: float
) -> dict[str, Any]:
    """Return TLS arguments for `loop.create_server`, with timeouts in seconds; empty without TLS.

    asyncio rejects the timeouts when `ssl` is None. Its own defaults would let a silent client delay shutdown by a
    minute.
    """
    if context is None:
        return {}
    return {
        "ssl": context,
        "ssl_handshake_timeout": handshake_timeout,
        "ssl_shutdown_timeout": shutdown_timeout,
    }


def enable_tcp_keepalive(transport: asyncio.BaseTransport) -> None:
    """Enable TCP keepalive, which detects peers that are gone without closing the connection."""
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def client_network(host: str) -> str:
    """Return the name of a client in limits: its IPv4 address or IPv6 network of 64 bits; "" for other hosts."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return f"{ipaddress.IPv6Address(address.packed[:8] + bytes(8))}/64"
        address = address.ipv4_mapped
    return str(address)


class WriteProgress:
    """Detects a client that does not read, while the write buffer of its connection is full.

    In each period of `timeout` seconds, at least `MIN_PROGRESS` bytes must leave the buffer. Data that is added
    meanwhile does not count, and neither do bytes that the client sends. Times are in seconds of one clock.
    """

    MIN_PROGRESS = 64 << 10

    __slots__ = ("_expected", "_started", "_timeout")

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._started: float | None = None
        self._expected = 0  # bytes that would be unsent if the client read nothing

    def start(self, now: float, unsent: int) -> None:
        """Begin when the buffer is full, with `unsent` bytes."""
        self._started = now
        self._expected = unsent

    def added(self, size: int) -> None:
        """Account for data that is written although the buffer is full."""
        self._expected += size

    def stop(self) -> None:
        """End when the buffer has room again."""
        self._started = None

    def stalled(self, now: float, unsent: int) -> bool:
        """Return whether the client has read too little in the period that has ended."""
        if self._started is None or now - self._started <= self._timeout:
            return False
        if self._expected - unsent < self.MIN_PROGRESS:
            return True
        self.start(now, unsent)
        return False


class ConnectionLimits:
    """Limits the connections in all and those of each client address. Several servers of a process may share one.

    An IPv6 client usually has a network of 64 bits, which counts as one address. Connections without an IP address are
    limited in all only.
    """

    def __init__(self, max_connections: int = 4096, max_per_address: int = 1024) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_per_address
        self._count = 0
        self._by_address: Counter[str] = Counter()

    def admit(self, transport: asyncio.BaseTransport) -> Admission | None:
        """Count a new connection. Returns None if a limit is reached; the server then closes it."""
        peer = transport.get_extra_info("peername")
        address = client_network(str(peer[0])) if isinstance(peer, tuple) else ""
        if self._count >= self.max_connections:
            return None
        if address:
            if self._by_address[address] >= self.max_per_address:
                return None
            self._by_address[address] += 1
        self._count += 1
        return Admission(self, address)

    def release(self, address: str) -> None:
        """Count the end of a connection."""
        self._count -= 1
        if address:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]


@dataclass(frozen=True, slots=True)
class Admission:
    """A connection that is counted by `limits` until `release`. `address`: see `client_network`."""

    limits: ConnectionLimits
    address: str

    def release(self) -> None:
        """Count the end of the connection."""
        self.limits.release(self.address)
