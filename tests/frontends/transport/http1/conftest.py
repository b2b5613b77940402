"""Fixtures: servers on a free port, and a raw socket client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop

from neso.frontends.transport.http1 import Handler, HttpServer, HttpServerOptions


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """Run every test on both event loops: their transports differ in when they write, close and raise."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


Serve = Callable[..., Awaitable[HttpServer]]


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class RawClient:
    """A raw TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))

    async def head(self) -> tuple[int, dict[str, str]]:
        text = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 60)).decode("latin-1")
        first, *lines = text.strip().split("\r\n")
        return int(first.split()[1]), {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }

    async def answer(self, *, bodyless: bool = False) -> Answer:
        status, headers = await self.head()
        if bodyless or status in (100, 204, 304):
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, b"".join([chunk async for chunk in self.chunks()]))
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        else:
            body = await self.reader.read()
        return Answer(status, headers, body)

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            yield await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)

    async def closed(self) -> bool:
        """Return whether the server closes the connection without sending more."""
        return await asyncio.wait_for(self.reader.read(), 60) == b""

    def close(self) -> None:
        self.writer.close()


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    servers: list[HttpServer] = []

    async def start(handler: Handler, **options: float) -> HttpServer:
        server = HttpServer(handler, HttpServerOptions(**options))  # type: ignore[arg-type]
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop(0.5)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[HttpServer], Awaitable[RawClient]]]:
    clients: list[RawClient] = []

    async def open_client(server: HttpServer) -> RawClient:
        clients.append(RawClient(*await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()
