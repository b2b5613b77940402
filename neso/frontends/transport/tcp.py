"""TCP settings shared by the servers, turns of the event loop, and limits on the number of connections."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING

from neso.frontends.transport.memory import MemoryAccount

if TYPE_CHECKING:
    from neso.server.shared_counts import SharedCounts


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


LARGE_READ = 64 << 10
"""Bytes of a read after which a connection checks its turn. The event loop reads up to 32 times 250 KB in a row."""


class Turn:
    """The time in which the connections of a server process received data before the event loop serves others.

    A turn begins with the first check and ends with the iteration of the loop. The loop's time does not identify an
    iteration, because uvloop updates it whenever a timer is started.
    """

    __slots__ = ("_ends", "_loop", "_seconds")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._ends: float | None = None

    def is_over(self) -> bool:
        """Whether the connections must let others run."""
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + self._seconds
            self._loop.call_soon(self._reset)
        return now >= self._ends

    def _reset(self) -> None:
        self._ends = None


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

    `body_memory`: bytes of the HTTP/1.1 requests in flight whose bodies arrived in several parts.

    An IPv6 client usually has a network of 64 bits, which counts as one address. Connections without an IP address are
    limited in all only. `shared`: counts of the connections of all server processes; None if there is one process.
    """

    def __init__(
        self,
        max_connections: int = 4096,
        max_per_address: int = 1024,
        max_body_memory: int = 1 << 30,
        shared: SharedCounts | None = None,
    ) -> None:
        self._shared = shared
        self.max_connections = max_connections
        self.max_per_address = max_per_address
        self.body_memory = MemoryAccount(max_body_memory)
        self.count = 0  # connections
        self._by_address: Counter[str] = Counter()

    def admit(self, transport: asyncio.BaseTransport) -> Admission | None:
        """Count a new connection. Returns None if a limit is reached; the server then closes it."""
        peer = transport.get_extra_info("peername")
        return self.admit_host(str(peer[0]) if isinstance(peer, tuple) else "")

    def admit_host(self, host: str) -> Admission | None:
        """Count a new connection of a client, by its IP address. Returns None if a limit is reached."""
        address = client_network(host)
        count, of_address = self.count, self._by_address.get(address, 0)
        if self._shared is not None:
            count += self._shared.elsewhere()
            of_address += self._shared.elsewhere(address) if address else 0
        if count >= self.max_connections or (address and of_address >= self.max_per_address):
            return None
        if self._shared is not None:
            self._shared.add(address, 1)
        if address:
            self._by_address[address] += 1
        self.count += 1
        return Admission(self, address)

    def release(self, address: str) -> None:
        """Count the end of a connection."""
        self.count -= 1
        if self._shared is not None:
            self._shared.add(address, -1)
        if address:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]


class Admission:
    """A connection that is counted by `limits` until `release`. `address`: see `client_network`."""

    __slots__ = ("_limits", "address")

    def __init__(self, limits: ConnectionLimits, address: str) -> None:
        self._limits: ConnectionLimits | None = limits
        self.address = address

    def release(self) -> None:
        """Count the end of the connection. Idempotent."""
        limits, self._limits = self._limits, None
        if limits is not None:
            limits.release(self.address)
