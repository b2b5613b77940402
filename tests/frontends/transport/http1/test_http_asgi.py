"""ASGI adapter, with a plain application and with FastAPI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from eventually import until
from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import StreamingResponse as FastStreaming

from neso.frontends.transport.http1 import AsgiApp, AsgiServer, HttpServerOptions

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


@pytest.fixture
async def serve_app() -> AsyncIterator:
    servers: list[AsgiServer] = []

    async def start(app, **options) -> AsgiServer:
        servers.append(AsgiServer(app, HttpServerOptions(**options)))
        await servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        await server.stop(0.5)


async def test_scope_and_echo(serve_app, connect) -> None:
    seen = {}

    async def app(scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            raise NotImplementedError  # by the specification: lifespan is not supported
        seen.update(scope)
        message = await receive()
        await send(
            {"type": "http.response.start", "status": 201, "headers": [(b"X-A", b"1"), (b"x-a", b"2")]}
        )
        await send({"type": "http.response.body", "body": message["body"]})
        assert (await receive())["type"] == "http.disconnect"

    client = await connect(await serve_app(app))
    client.send(b"POST /a%2Fb?q=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi")
    answer = await client.answer()
    assert (answer.status, answer.body, answer.headers["x-a"]) == (201, b"hi", "2")
    assert answer.headers["content-length"] == "2"
    assert seen["path"] == "/a/b" and seen["raw_path"] == b"/a%2Fb" and seen["query_string"] == b"q=1"
    assert seen["method"] == "POST" and seen["client"][0] == "127.0.0.1" and seen["http_version"] == "1.1"
    assert (b"host", b"h") in seen["headers"]


async def test_disconnect_is_received_and_the_task_is_cancelled(serve_app, connect) -> None:
    events: list[str] = []
    started, ended = asyncio.Event(), asyncio.Event()

    async def app(scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            return
        await receive()
        waiting = asyncio.ensure_future(receive())
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            events.append("cancelled")
            events.append((await waiting)["type"])
            raise
        finally:
            ended.set()

    client = await connect(await serve_app(app))
    client.send(GET)
    await started.wait()
    client.close()
    await asyncio.wait_for(ended.wait(), 60)
    assert events == ["cancelled", "http.disconnect"]


@pytest.mark.parametrize("case", ["before", "during", "nothing", "unfinished"])
async def test_failing_applications(serve_app, connect, case) -> None:
    async def app(scope, receive, send) -> None:
        if scope["type"] == "lifespan" or case == "nothing":
            return
        if case != "before":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        if case != "unfinished":
            raise ValueError("broken")

    client = await connect(await serve_app(app))
    client.send(GET)
    if case in ("before", "nothing"):
        assert (await client.answer()).status == 500
    else:
        with pytest.raises(asyncio.IncompleteReadError):
            await client.answer()


def make_fastapi(log: list[str], gate: asyncio.Event | None = None) -> FastAPI:
    """An application whose background work waits for `gate`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, int]]:
        log.append("startup")
        yield {"answer": 42}
        log.append("shutdown")

    app = FastAPI(lifespan=lifespan)

    @app.post("/items/{item}")
    async def item(item: str, body: dict[str, int], background: BackgroundTasks) -> dict[str, object]:
        async def work() -> None:
            if gate is not None:
                await gate.wait()
            log.append(f"background {item}")

        background.add_task(work)
        return {"item": item, "sum": sum(body.values())}

    @app.get("/stream")
    async def stream() -> FastStreaming:
        async def produce() -> AsyncIterator[bytes]:
            try:
                for i in range(1000):
                    yield b"%d\n" % i
                    await asyncio.sleep(0.01 if i > 2 else 0)
            finally:
                log.append("stream closed")

        return FastStreaming(produce(), media_type="text/event-stream")

    return app


async def test_fastapi(serve_app, connect) -> None:
    log: list[str] = []
    gate = asyncio.Event()
    server = await serve_app(make_fastapi(log, gate))
    client = await connect(server)
    body = b'{"a":1,"b":2}'
    client.send(
        *[
            b"POST /items/x HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        ]
        * 2,
        b"HEAD /stream HTTP/1.1\r\nHost: h\r\n\r\n",
        b"GET /openapi.json HTTP/1.1\r\nHost: h\r\n\r\n",
    )
    for _ in range(2):
        answer = await client.answer()
        assert answer.body == b'{"item":"x","sum":3}' and answer.headers["content-type"] == "application/json"
    # Background work blocks neither the connection nor its close.
    assert log == ["startup"]
    assert (await client.answer(bodyless=True)).status == 405
    assert (await client.answer()).status == 200
    client.close()
    gate.set()
    await until(lambda: len(log) == 3)
    assert log == ["startup", "background x", "background x"]
    await server.stop()
    assert log[-1] == "shutdown"


async def test_fastapi_stream_is_closed_on_disconnect(serve_app, connect) -> None:
    log: list[str] = []
    client = await connect(await serve_app(make_fastapi(log)))
    client.send(b"GET /stream HTTP/1.1\r\nHost: h\r\n\r\n")
    await client.head()
    assert await anext(client.chunks()) == b"0\n"
    client.close()
    await until(lambda: "stream closed" in log)


async def test_one_application_on_two_servers_starts_once(serve_app) -> None:
    log: list[str] = []
    app = AsgiApp(make_fastapi(log))
    first, second = await serve_app(app), await serve_app(app)
    await first.stop()
    assert log == ["startup"]
    await second.stop()
    assert log == ["startup", "shutdown"]


async def test_failed_startup_raises(serve_app) -> None:
    async def app(scope, receive, send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database"})

    with pytest.raises(RuntimeError, match="no database"):
        await serve_app(app)
