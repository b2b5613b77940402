"""TCP and TLS settings shared by the servers."""

from __future__ import annotations

import asyncio
import socket
import ssl
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
