"""An HTTP client that connects only to public addresses, not to this machine or its network."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import httpcore2 as httpcore


class FetchError(Exception):
    """A file could not be fetched."""


@dataclass(frozen=True, slots=True)
class Redirect:
    """The response is a redirect to `url`."""

    url: str


class PublicHttpClient:
    """A pool of at most 16 connections. Each host name is resolved once; the connection uses the checked address."""

    def __init__(self) -> None:
        self._pool = httpcore.AsyncConnectionPool(max_connections=16, network_backend=_PublicOnly())

    async def get(self, url: str, max_bytes: int) -> bytes | Redirect:
        """Fetch a file of at most `max_bytes`, or return the redirect. Raises `FetchError`."""
        headers = [(b"user-agent", b"neso"), (b"accept", b"image/*")]
        try:
            async with self._pool.stream("GET", url, headers=headers) as response:
                fields = {name.lower(): value for name, value in response.headers}
                if response.status in (301, 302, 303, 307, 308) and b"location" in fields:
                    return Redirect(urljoin(url, fields[b"location"].decode("latin-1")))
                if response.status != 200:
                    raise FetchError(f"it answers with status {response.status}")
                content = bytearray()
                async for part in response.aiter_stream():
                    content += part
                    if len(content) > max_bytes:
                        raise FetchError(f"it is larger than {max_bytes} bytes")
                return bytes(content)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise FetchError(str(error) or type(error).__name__) from None

    async def close(self) -> None:
        """Close idle connections."""
        await self._pool.aclose()


class _PublicOnly(httpcore.AnyIOBackend):
    """Network backend that rejects hosts with a non-public address."""

    async def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> Any:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        if not addresses or not all(map(is_public, addresses)):
            raise FetchError(f"{host} has no public address")
        return await super().connect_tcp(addresses[0], port, *args, **options)


def is_public(address: str) -> bool:
    """Whether an IP address is globally routable; IPv4 addresses embedded in IPv6 are checked as IPv4."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast
