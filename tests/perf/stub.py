"""An HTTP server whose handler writes raw bytes, for tests of the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Handler = Callable[["StubRequest", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class StubRequest:
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class StubServer:
    url: str = ""
    requests: list[StubRequest] = field(default_factory=list)
    num_connections: int = 0


@asynccontextmanager
async def stub_server(handle: Handler) -> AsyncIterator[StubServer]:
    """Serve on a free port until the context ends."""
    stub = StubServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stub.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                stub.requests.append(StubRequest(first.split()[1], headers, body))
                await handle(stub.requests[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        server.close()


def response(body: bytes, status: str = "200 OK", kind: str = "application/json") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        status.encode(),
        kind.encode(),
        len(body),
        body,
    )


def stream(*events: bytes) -> bytes:
    """A chunked response with one event in each chunk."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
