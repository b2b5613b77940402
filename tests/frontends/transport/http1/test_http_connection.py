"""HTTP/1.1 connections: ordering, framing, limits, timeouts and disconnects."""

from __future__ import annotations

import asyncio
import http.client
import socket
import struct
import time

import pytest
from eventually import standstill, until

from neso.frontends.transport.http1 import (
    BindError,
    HttpServer,
    HttpServerOptions,
    Request,
    Response,
    StreamingResponse,
)
from neso.frontends.transport.tcp import WriteProgress

GET = b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"


def post(body: bytes, path: str = "/") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body)


async def echo(request: Request) -> Response:
    await asyncio.sleep(0)
    return Response(request.body, 200, "text/plain")


def echo_sync(request: Request) -> Response:
    return Response(request.body, 200, "text/plain")


@pytest.mark.parametrize("handler", [echo, echo_sync])
async def test_pipelined_requests_are_answered_in_order(serve, connect, handler) -> None:
    client = await connect(await serve(handler))
    bodies = [b"%d" % i for i in range(3000)]  # more than the recursion limit
    client.send(b"".join(map(post, bodies)))
    assert [(await client.answer()).body for _ in bodies] == bodies


async def test_slow_handlers_do_not_reorder_responses(serve, connect) -> None:
    async def handler(request: Request) -> Response:
        await asyncio.sleep(0.02 if request.body == b"slow" else 0)
        return Response(request.body)

    client = await connect(await serve(handler))
    client.send(post(b"slow"), post(b"quick"), post(b"slow"))
    assert [(await client.answer()).body for _ in range(3)] == [b"slow", b"quick", b"slow"]


async def test_pipelining_limit_pauses_reading(serve, connect) -> None:
    gate = asyncio.Event()

    async def handler(request: Request) -> Response:
        await gate.wait()
        return Response(request.body)

    server = await serve(handler, max_pipelined=2)
    client = await connect(server)
    body = b"x" * 100_000
    for _ in range(100):
        client.send(post(body))
    await asyncio.sleep(0.1)
    assert client.writer.transport.get_write_buffer_size() > 0  # the 10 MB were not read
    gate.set()
    for _ in range(100):
        assert len((await client.answer()).body) == len(body)


async def test_request_sent_byte_by_byte(serve, connect) -> None:
    client = await connect(await serve(echo))
    for byte in post(b"hello"):
        client.send(bytes([byte]))
        await client.writer.drain()
        await asyncio.sleep(0)
    assert (await client.answer()).body == b"hello"


async def test_chunked_request_body(serve, connect) -> None:
    client = await connect(await serve(echo))
    client.send(b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n", b"5\r\nhello\r\n")
    await asyncio.sleep(0.01)
    client.send(b"1\r\n!\r\n0\r\n\r\n")
    assert (await client.answer()).body == b"hello!"


async def test_head_has_the_length_and_no_body(serve, connect) -> None:
    client = await connect(await serve(lambda request: Response(b"12345")))
    client.send(GET.replace(b"GET", b"HEAD"), GET)
    assert (await client.answer(bodyless=True)).headers["content-length"] == "5"
    assert (await client.answer()).body == b"12345"


async def test_status_204_has_no_body(serve, connect) -> None:
    client = await connect(await serve(lambda request: Response(b"", 204, None)))
    client.send(GET, GET)
    for _ in range(2):
        answer = await client.answer()
        assert answer.status == 204 and "content-length" not in answer.headers


async def test_body_as_list_of_buffers(serve, connect) -> None:
    parts = [b"json", memoryview(bytes(1 << 20)), b"end"]
    client = await connect(await serve(lambda request: Response(parts)))
    client.send(GET)
    assert (await client.answer()).body == b"".join(parts)


async def test_http_1_0_closes_without_keep_alive_header(serve, connect) -> None:
    server = await serve(echo)
    client = await connect(server)
    client.send(b"GET / HTTP/1.0\r\n\r\n")
    assert (await client.answer()).headers["connection"] == "close"
    assert await client.closed()
    client = await connect(server)
    for _ in range(2):
        client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.answer()).headers["connection"] == "keep-alive"


async def test_connection_close_is_honoured(serve, connect) -> None:
    client = await connect(await serve(echo))
    client.send(GET, b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n", GET)
    assert "connection" not in (await client.answer()).headers
    assert (await client.answer()).headers["connection"] == "close"
    assert await client.closed()


async def test_expect_continue(serve, connect) -> None:
    client = await connect(await serve(echo))
    expecting = b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
    client.send(expecting)
    assert (await client.answer()).status == 100
    client.send(b"ok")
    assert (await client.answer()).body == b"ok"
    client.send(expecting + b"ok")  # sent without waiting for 100 Continue
    assert (await client.answer()).status == 200


async def test_large_body_is_rejected_before_it_is_sent(serve, connect) -> None:
    client = await connect(await serve(echo, max_body=100))
    client.send(b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n")
    answer = await client.answer()
    assert answer.status == 413 and answer.headers["connection"] == "close"
    assert b"exceeds the limit of 100" in answer.body
    assert await client.closed()


async def test_client_that_keeps_sending_can_read_the_error(serve) -> None:
    server = await serve(echo, max_body=1000)

    def upload() -> int:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/", bytes(8 << 20))
        status = connection.getresponse().status
        connection.close()
        return status

    assert await asyncio.to_thread(upload) == 413


async def test_malformed_request_is_rejected_in_order(serve, connect) -> None:
    client = await connect(await serve(echo))
    client.send(post(b"good"), b"nonsense\r\n\r\n", post(b"never"))
    assert (await client.answer()).body == b"good"
    answer = await client.answer()
    assert answer.status == 400 and answer.body == b'{"error":"malformed HTTP request"}'
    assert await client.closed()


async def test_slow_headers_time_out(serve, connect) -> None:
    client = await connect(await serve(echo, header_timeout=0.1))
    client.send(b"GET / HTTP/1.1\r\n")
    for _ in range(100):  # slow bytes do not extend the timeout
        await asyncio.sleep(0.01)
        if client.reader.at_eof():
            break
        client.send(b"X: y\r\n")
    assert (await client.answer()).status == 408


async def test_stalled_body_times_out(serve, connect) -> None:
    client = await connect(await serve(echo, body_timeout=0.1))
    client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n123")
    assert (await client.answer()).status == 408


async def test_slow_bytes_of_a_body_do_not_extend_its_timeout(serve, connect) -> None:
    client = await connect(await serve(echo, body_timeout=0.2))
    client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(50):
        await asyncio.sleep(0.02)
        if client.reader.at_eof():
            break
        client.send(b"x")
    assert (await client.answer()).status == 408


async def test_the_time_for_a_body_begins_with_each_request(serve, connect) -> None:
    client = await connect(await serve(echo, body_timeout=0.3))
    for _ in range(6):
        client.send(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\na")
        await asyncio.sleep(0.1)
        client.send(b"b")
        assert (await client.answer()).body == b"ab"


async def test_idle_connections_are_closed_quietly(serve, connect) -> None:
    client = await connect(await serve(echo, keep_alive_timeout=0.1))
    client.send(GET)
    await client.answer()
    assert await client.closed()


async def test_no_timeout_while_a_handler_runs(serve, connect) -> None:
    async def handler(request: Request) -> Response:
        await asyncio.sleep(0.3)
        return Response(b"done")

    client = await connect(
        await serve(handler, keep_alive_timeout=0.05, header_timeout=0.05, body_timeout=0.05)
    )
    client.send(GET)
    assert (await client.answer()).body == b"done"


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("streaming", [False, True])
async def test_disconnect_cancels_the_handler(serve, connect, how, streaming) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        if streaming:
            StreamingResponse(request).write(b"first")
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    server = await serve(handler)
    client = await connect(server)
    client.send(post(b"x"))
    await started.wait()
    if how == "half-close":
        client.writer.write_eof()
    elif how == "reset":
        raw = client.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.writer.transport.abort()
    else:
        client.close()
    await asyncio.wait_for(cancelled.wait(), 60)
    await until(lambda: not server._context.connections and not server._context.tasks)


async def test_streaming_is_immediate_and_chunked(serve, connect) -> None:
    gate = asyncio.Event()

    async def handler(request: Request) -> StreamingResponse:
        response = StreamingResponse(request, 200, "text/event-stream")
        response.write(b"one")
        await gate.wait()
        response.write(b"")
        response.write(b"two")
        return response

    client = await connect(await serve(handler))
    client.send(GET, GET)
    status, headers = await client.head()
    assert status == 200 and headers["transfer-encoding"] == "chunked"
    chunks = client.chunks()
    assert await asyncio.wait_for(anext(chunks), 60) == b"one"
    gate.set()
    assert [chunk async for chunk in chunks] == [b"two"]
    assert (await client.answer()).body == b"onetwo"


async def test_streaming_to_http_1_0_closes_the_connection(serve, connect) -> None:
    async def handler(request: Request) -> StreamingResponse:
        response = StreamingResponse(request)
        response.write(b"all")
        return response

    client = await connect(await serve(handler))
    client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
    answer = await client.answer()
    assert "transfer-encoding" not in answer.headers and answer.body == b"all"


async def test_backpressure_blocks_drain(serve, connect) -> None:
    written = 0

    async def handler(request: Request) -> StreamingResponse:
        nonlocal written
        response = StreamingResponse(request)
        for _ in range(400):
            response.write(bytes(100_000))
            written += 100_000
            await response.drain()
        return response

    client = await connect(await serve(handler, write_buffer=1 << 16))
    client.send(GET)
    await until(lambda: written)
    assert await standstill(lambda: written, 20_000_000) < 20_000_000  # at most the kernel's buffers
    assert len((await client.answer()).body) == 40_000_000


async def test_pipelined_requests_wait_while_responses_are_not_read(serve, connect) -> None:
    handled = 0

    def handler(request: Request) -> Response:
        nonlocal handled
        handled += 1
        return Response(bytes(1 << 20))

    client = await connect(await serve(handler, write_buffer=1 << 16))
    for _ in range(200):
        client.send(GET)
    await until(lambda: handled)
    assert await standstill(lambda: handled, 200) < 30  # the kernel's buffers hold some responses
    for _ in range(200):
        assert len((await client.answer()).body) == 1 << 20
    assert handled == 200


@pytest.mark.parametrize("streamed", [False, True])
async def test_write_timeout_is_not_renewed_by_received_data(serve, connect, streamed) -> None:
    async def handler(request: Request) -> Response | StreamingResponse:
        if not streamed:
            return Response(bytes(32 << 20))
        response = StreamingResponse(request)
        while True:
            response.write(bytes(1 << 20))
            await response.drain()

    server = await serve(handler, write_timeout=0.4)
    client = await connect(server)
    client.send(GET)
    connections = server._context.connections
    await until(lambda: connections)
    started = time.monotonic()
    while connections and time.monotonic() - started < 60:
        client.send(GET)  # requests keep arriving, but nothing is read
        await asyncio.sleep(0.05)
    assert not connections


def test_slow_reader_is_not_stalled() -> None:
    progress = WriteProgress(timeout=10)
    assert not progress.stalled(100, 0)  # the buffer is not full
    progress.start(0, 1 << 20)
    assert not progress.stalled(10, 1 << 20)
    assert not progress.stalled(11, (1 << 20) - WriteProgress.MIN_PROGRESS)
    progress.added(1 << 20)
    assert progress.stalled(22, (2 << 20) - WriteProgress.MIN_PROGRESS - 1)  # the new data hides no stall


async def test_client_that_never_reads_is_disconnected(serve, connect) -> None:
    gone = asyncio.Event()

    async def handler(request: Request) -> StreamingResponse:
        response = StreamingResponse(request)
        try:
            while True:
                response.write(bytes(1 << 20))
                await response.drain()
        finally:
            gone.set()

    client = await connect(await serve(handler, write_timeout=0.2))
    client.send(GET)
    await asyncio.wait_for(gone.wait(), 60)


async def test_handler_errors(serve, connect, caplog) -> None:
    async def handler(request: Request) -> Response:
        if request.body == b"late":
            StreamingResponse(request).write(b"begun")
        if request.body == b"nothing":
            return None  # type: ignore[return-value]
        raise ValueError("secret")

    client = await connect(await serve(handler))
    client.send(post(b"early"), post(b"nothing"), post(b"late"))
    for _ in range(2):
        answer = await client.answer()
        assert answer.status == 500 and answer.body == b'{"error":"internal error"}'
    with pytest.raises(asyncio.IncompleteReadError):  # aborted without the last chunk
        await client.answer()
    assert "secret" in caplog.text


async def test_header_injection_is_rejected(serve, connect) -> None:
    client = await connect(await serve(lambda r: Response(b"", headers=[("x", "a\r\nset-cookie: b")])))
    client.send(GET)
    assert (await client.answer()).status == 500


async def test_stop_waits_for_requests_in_flight(serve, connect) -> None:
    begun, gate = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        begun.set()
        await gate.wait()
        return Response(b"finished")

    server = await serve(handler)
    idle, busy = await connect(server), await connect(server)
    busy.send(GET)
    await begun.wait()
    stopping = asyncio.create_task(server.stop(60))
    assert await idle.closed()
    gate.set()
    answer = await busy.answer()
    assert answer.body == b"finished" and answer.headers["connection"] == "close"
    await asyncio.wait_for(stopping, 60)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.options.port or 1)


async def test_stop_cancels_requests_after_the_grace_period(serve, connect) -> None:
    begun = asyncio.Event()

    async def handler(request: Request) -> Response:
        begun.set()
        await asyncio.sleep(3600)
        raise AssertionError

    server = await serve(handler)
    client = await connect(server)
    client.send(GET)
    await begun.wait()
    await asyncio.wait_for(server.stop(0.1), 60)
    assert not server._context.tasks


async def test_port_in_use_error_names_the_port(serve) -> None:
    server = await serve(echo)
    other = HttpServer(echo, HttpServerOptions(port=server.port))
    with pytest.raises(BindError, match=rf"cannot listen on 127\.0\.0\.1:{server.port}: the port is in use"):
        await other.start()
    with pytest.raises(BindError, match="cannot listen on"):
        await HttpServer(echo, HttpServerOptions(host="no.such.host.invalid")).start()


async def test_standard_client_with_keep_alive(serve) -> None:
    server = await serve(echo)

    def talk() -> list[bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        bodies = []
        for i in range(50):
            connection.request("POST", "/", b"%d" % i)
            bodies.append(connection.getresponse().read())
        connection.close()
        return bodies

    assert await asyncio.to_thread(talk) == [b"%d" % i for i in range(50)]
