"""TLS connections: handshakes are counted and have a time limit."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trustme
from eventually import until

from neso.frontends.transport.http1 import HttpServer, HttpServerOptions, Request, Response
from neso.frontends.transport.tcp import ConnectionLimits

AUTHORITY = trustme.CA()
Start = Callable[..., Awaitable[tuple[HttpServer, ConnectionLimits]]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    servers: list[HttpServer] = []

    async def run(**options: float) -> tuple[HttpServer, ConnectionLimits]:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        AUTHORITY.issue_cert("localhost").configure_cert(tls)
        limits = ConnectionLimits(max_connections=3)

        def echo(request: Request) -> Response:
            return Response(request.body)

        server = HttpServer(echo, HttpServerOptions(tls=tls, **options), limits)  # type: ignore[arg-type]
        await server.start()
        servers.append(server)
        return server, limits

    yield run
    for server in servers:
        await server.stop(0.5)


async def request(server: HttpServer) -> bytes:
    client = ssl.create_default_context()
    AUTHORITY.configure_trust(client)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=client, server_hostname="localhost"
    )
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
    answer = await reader.read()
    writer.close()
    return answer


async def test_connections_are_counted_once(start):
    server, limits = await start()
    for _ in range(5):
        assert (await request(server)).endswith(b"\r\n\r\nhi")
        await until(lambda: limits.count == 0)


async def test_handshakes_count_as_connections(start):
    server, limits = await start()
    silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
    await until(lambda: limits.count == 3)
    with pytest.raises((OSError, ssl.SSLError)):
        await request(server)
    for _, writer in silent:
        writer.close()
    await until(lambda: limits.count == 0)
    assert (await request(server)).endswith(b"hi")


async def test_handshakes_have_a_time_limit(start):
    server, limits = await start(header_timeout=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    await until(lambda: limits.count == 0)
    writer.close()


async def test_connections_without_tls_are_closed(start):
    server, limits = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    await asyncio.wait_for(reader.read(), 30)
    await until(lambda: limits.count == 0)
    writer.close()


async def test_stop_ends_handshakes(start):
    server, limits = await start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await until(lambda: limits.count == 1)
    await asyncio.wait_for(server.stop(5), 30)
    await until(lambda: limits.count == 0)
    writer.close()
