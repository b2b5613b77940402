"""Memory for the bodies of all connections: bodies wait, are rejected, and give it back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from eventually import until

from neso.frontends.transport.http1 import HttpServer, HttpServerOptions, Request, Response
from neso.frontends.transport.tcp import ConnectionLimits

LIMIT = 1 << 20
Start = Callable[..., Awaitable[tuple[HttpServer, ConnectionLimits]]]


async def size_of_body(request: Request) -> Response:
    return Response(b"%d" % len(request.body))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    servers: list[HttpServer] = []

    async def run(handler: Any = size_of_body, **options: float) -> tuple[HttpServer, ConnectionLimits]:
        limits = ConnectionLimits(max_body_memory=LIMIT)
        server = HttpServer(handler, HttpServerOptions(**options), limits)  # type: ignore[arg-type]
        await server.start()
        servers.append(server)
        return server, limits

    yield run
    for server in servers:
        await server.stop(0.5)


def head(length: int, extra: bytes = b"") -> bytes:
    return b"POST / HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d\r\n\r\n" % (extra, length)


async def test_body_waits_until_another_is_complete(start, connect):
    server, limits = await start()
    first, second = await connect(server), await connect(server)
    size = LIMIT // 2
    first.send(head(size), b"x")
    await until(lambda: limits.body_memory.used == size)
    second.send(head(size, b"Expect: 100-continue\r\n"))
    third = await connect(server)
    third.send(head(5), b"small")
    assert (await third.answer()).body == b"5"  # bodies that arrive at once do not wait
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting := asyncio.ensure_future(second.answer())), 0.05)
    first.send(b"x" * (size - 1))
    assert (await first.answer()).body == b"%d" % size
    assert (await waiting).status == 100
    second.send(b"x" * size)
    assert (await second.answer()).body == b"%d" % size
    await until(lambda: limits.body_memory.used == 0)


async def test_memory_is_held_until_the_response(start, connect):
    gate = asyncio.Event()

    async def handler(request: Request) -> Response:
        await gate.wait()
        return Response(b"done")

    server, limits = await start(handler)
    client = await connect(server)
    client.send(head(100_000), b"x")
    await until(lambda: limits.body_memory.used == 100_000)
    client.send(b"x" * 99_999, head(3), b"abc")  # and a pipelined request
    await until(lambda: next(iter(server._context.connections))._request is not None)
    assert limits.body_memory.used == 100_000
    gate.set()
    assert (await client.answer()).body == (await client.answer()).body == b"done"
    assert limits.body_memory.used == 0


async def test_disconnect_returns_memory(start, connect):
    server, limits = await start()
    first, second = await connect(server), await connect(server)
    first.send(head(LIMIT // 2), b"x")
    await until(lambda: limits.body_memory.used)
    second.send(head(LIMIT // 2), b"x" * 1000)
    first.close()
    second.send(b"x" * (LIMIT // 2 - 1000))
    assert (await second.answer()).body == b"%d" % (LIMIT // 2)
    second.send(head(LIMIT // 2), b"x")
    await until(lambda: limits.body_memory.used)
    second.close()
    await until(lambda: limits.body_memory.used == 0)


async def test_body_that_waits_too_long_is_rejected(start, connect):
    server, limits = await start(body_timeout=0.2)
    taken = limits.body_memory.reserve(LIMIT // 2, lambda: None)
    assert taken is None
    client = await connect(server)
    client.send(head(LIMIT // 2), b"x")
    answer = await client.answer()
    assert answer.status == 503 and b"no memory for the request body" in answer.body
    await until(lambda: limits.body_memory.used == LIMIT // 2)


async def test_body_beyond_the_memory_is_rejected(start, connect):
    server, limits = await start()
    client = await connect(server)
    client.send(head(LIMIT), b"x")
    assert (await client.answer()).status == 503
    assert limits.body_memory.used == 0


async def test_chunked_body_is_accounted_for_as_it_arrives(start, connect):
    server, limits = await start()
    client = await connect(server)
    chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", chunk * 4)
    await until(lambda: limits.body_memory.used >= 4 << 16)
    client.send(chunk * 4, b"0\r\n\r\n")
    assert (await client.answer()).body == b"%d" % (8 << 16)
    assert limits.body_memory.used == 0
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", chunk * 17)
    assert (await client.answer()).status == 503
    assert limits.body_memory.used == 0
