"""Free ports for servers that cannot choose one themselves."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a free port below the ephemeral range, so that no outgoing connection takes it."""
    while True:
        with socket.socket() as found:
            try:
                found.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            except OSError:
                continue
            return int(found.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """Return different free ports."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)
