"""gRPC server with the clients of grpcio, over sockets."""

from __future__ import annotations

import asyncio
import datetime
import gc
import ssl
import weakref

import grpc
import grpc.aio
import pytest
import trustme
from eventually import standstill, until

from neso.frontends.transport.grpc.call import CallbackCall
from neso.frontends.transport.grpc.compression import Inflation
from neso.frontends.transport.grpc.coroutine_call import CoroutineCall
from neso.frontends.transport.http2.lifetime import Keepalive

UNARY = ["/t.Test/Echo", "/t.Test/Callback"]


async def status_of(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


# The four kinds of methods.


@pytest.mark.parametrize("path", UNARY)
@pytest.mark.parametrize("message", [b"", b"hello", bytes(70_000)])
async def test_unary(channel, path, message):
    assert await channel.unary_unary(path)(message) == message


async def test_callback_handler_replies_later(channel):
    method = channel.unary_unary("/t.Test/Callback")
    assert await asyncio.gather(*(method(b"later") for _ in range(20))) == [b"later"] * 20


async def test_client_streaming(channel):
    messages = [b"%d," % i for i in range(1000)]
    assert await channel.stream_unary("/t.Test/Join")(iter(messages)) == b"".join(messages)
    assert await channel.stream_unary("/t.Test/Join")(iter([])) == b""


async def test_server_streaming(channel):
    got = [message async for message in channel.unary_stream("/t.Test/Split")(b"2000 word")]
    assert got == [b"word"] * 2000


async def test_bidirectional_streaming(channel):
    call = channel.stream_stream("/t.Test/Chat")()
    for i in range(50):
        await call.write(b"%d" % i)
        assert await call.read() == b"%d" % i
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_fifty_megabyte_messages(channel):
    message = bytes(range(256)) * (50 * 4096)
    assert await channel.unary_unary("/t.Test/Echo")(message, timeout=60) == message
    assert await channel.unary_unary("/t.Test/Callback")(message, timeout=60) == message
    assert await channel.stream_unary("/t.Test/Join")(iter([message[:1000]] * 3)) == message[:1000] * 3


async def test_hundreds_of_concurrent_calls_on_one_connection(channel, server):
    echo, split = channel.unary_unary("/t.Test/Echo"), channel.unary_stream("/t.Test/Split")

    async def chat(i: int) -> None:
        call = channel.stream_stream("/t.Test/Chat")()
        for j in range(5):
            await call.write(b"%d %d" % (i, j) * 500)
            assert await call.read() == b"%d %d" % (i, j) * 500
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF

    async def words(i: int) -> None:
        assert [m async for m in split(b"20 %d" % i)] == [b"%d" % i] * 20

    async def same(i: int) -> None:
        body = b"%d" % i * 5000
        assert await echo(body) == body

    await asyncio.gather(*(kind(i) for i in range(100) for kind in (chat, words, same)))
    assert len(server._context.connections) == 1


async def test_synchronous_client(server):
    def talk() -> None:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for path in UNARY:
                assert channel.unary_unary(path)(b"x", timeout=60) == b"x"
            assert channel.stream_unary("/t.Test/Join")(iter([b"a", b"b"]), timeout=60) == b"ab"
            assert list(channel.unary_stream("/t.Test/Split")(b"3 x", timeout=60)) == [b"x"] * 3
            assert list(channel.stream_stream("/t.Test/Chat")(iter([b"a", b"b"]), timeout=60)) == [b"a", b"b"]

    await asyncio.to_thread(talk)


# Statuses.


async def test_statuses(channel):
    def method(name: str):
        return channel.unary_unary(f"/t.Test/{name}")

    assert await status_of(method("Bug")(b"")) == (grpc.StatusCode.UNKNOWN, "Unexpected KeyError: 'lost'")
    assert await status_of(method("Callback")(b"raise")) == (
        grpc.StatusCode.UNKNOWN,
        "Unexpected KeyError: 'lost'",
    )
    assert await status_of(method("Callback")(b"fail")) == (grpc.StatusCode.NOT_FOUND, "no such thing")
    assert (await status_of(method("Nowhere")(b"")))[0] is grpc.StatusCode.UNIMPLEMENTED
    assert (await status_of(method("Unreadable")(b"")))[0] is grpc.StatusCode.INTERNAL
    assert (await status_of(method("Unwritable")(b"")))[0] is grpc.StatusCode.INTERNAL
    assert await method("Echo")(b"others go on") == b"others go on"


@pytest.mark.parametrize("text", ["plain", "100% of it", "Grüße, 世界\n\t😀", "", " spaces "])
async def test_status_messages(channel, text):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/t.Test/Abort")(text.encode())
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.FAILED_PRECONDITION, text)
    assert dict(caught.value.trailing_metadata()) == {"why": "so", "raw-bin": b"\0\xff"}


async def test_long_status_message_is_truncated(channel):
    code, details = await status_of(channel.unary_unary("/t.Test/Abort")("ü".encode() * 30_000))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert details.startswith("üüü") and details.endswith("ü...")


async def test_stream_ends_with_an_error(channel):
    call = channel.stream_stream("/t.Test/Chat")()
    await call.write(b"a")
    assert await call.read() == b"a"
    await call.write(b"fail")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "as you wish")


# Metadata, compression, limits.


async def test_metadata(channel):
    sent = (("a", "1"), ("a", "2"), ("raw-bin", b"\0\xff,"), ("raw-bin", b""), ("raw-bin", b"x" * 100))
    reply = await channel.unary_unary("/t.Test/Metadata")(b"", metadata=sent)
    assert eval(reply) == list(sent)
    about = (await channel.unary_unary("/t.Test/About")(b"", timeout=50)).decode().split()
    assert about[0].startswith("ipv4:127.0.0.1:") and 40 < float(about[1]) < 51


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_compression(serve, connect, compression):
    message = b"again and again " * 10_000
    for level in (None, 6):
        channel = connect(await serve(compress_level=level), compression=compression)
        for path in UNARY:
            assert await channel.unary_unary(path)(message) == message
        assert [m async for m in channel.unary_stream("/t.Test/Split")(b"3 " + message)] == [message] * 3


async def test_failed_decompression_ends_the_call(channel, monkeypatch, caplog):
    def fail(inflation):
        raise MemoryError

    monkeypatch.setattr(Inflation, "run", fail)
    call = channel.unary_unary("/t.Test/Callback")(
        bytes(1 << 20), compression=grpc.Compression.Gzip, timeout=60
    )
    assert await status_of(call) == (grpc.StatusCode.UNKNOWN, "Unexpected MemoryError: ")
    assert "cannot decompress" in caplog.text


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_large_and_small_compressed_messages_keep_their_order(channel, compression):
    messages = [bytes([n]) * size for n, size in enumerate((3_000_000, 10, 200_000, 1_000_000, 0))]
    joined = await channel.stream_unary("/t.Test/Join")(iter(messages), compression=compression)
    assert joined == b"".join(messages)


async def test_message_size_limit(serve, connect):
    channel = connect(await serve(max_message=1000))
    echo = channel.unary_unary("/t.Test/Echo")
    assert await echo(bytes(1000)) == bytes(1000)
    code, details = await status_of(echo(bytes(1001)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "(1001 vs. 1000)" in details
    assert await echo(bytes(1000), compression=grpc.Compression.Gzip) == bytes(1000)
    code, _ = await status_of(echo(bytes(1001), compression=grpc.Compression.Gzip))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    chat = channel.stream_stream("/t.Test/Chat")()
    await chat.write(bytes(1001))
    with pytest.raises(grpc.aio.AioRpcError):
        await chat.read()


# Cancellation and deadlines.


@pytest.mark.parametrize("path", ["/t.Test/Wait", "/t.Test/Callback"])
async def test_cancelled_call(channel, methods, path):
    call = channel.unary_unary(path)(b"wait")
    await until(lambda: methods.log == ["waits"])
    call.cancel()
    await until(lambda: methods.log == ["waits", "cancelled"])


@pytest.mark.parametrize("path", ["/t.Test/Wait", "/t.Test/Callback"])
async def test_deadline(channel, methods, path):
    for timeout in (0.1, 1, 10):  # a call with a deadline that expires before sending does not arrive
        code, _ = await status_of(channel.unary_unary(path)(b"wait", timeout=timeout))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        if methods.log:
            break
    await until(lambda: methods.log and methods.log.count("waits") == methods.log.count("cancelled"))
    for call in methods.contexts:
        call.reply(b"too late")
        call.fail(grpc.StatusCode.ABORTED, "too late")


@pytest.mark.parametrize("path", ["/t.Test/Wait", "/t.Test/Callback"])
async def test_client_disconnect(serve, methods, connect, path):
    server = await serve()
    channel = connect(server)
    call = asyncio.ensure_future(channel.unary_unary(path)(b"wait"))
    await until(lambda: methods.log == ["waits"])
    await channel.close()
    await until(lambda: methods.log == ["waits", "cancelled"])
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call
    await until(lambda: not server._context.connections)


async def test_streams_are_cancelled(channel, methods):
    endless = channel.unary_stream("/t.Test/Endless")(b"")
    await endless.read()
    endless.cancel()
    await until(lambda: methods.log == ["waits", "cancelled"])
    chat = channel.stream_stream("/t.Test/Chat")()
    await chat.write(b"x")
    await chat.read()
    chat.cancel()
    await until(lambda: methods.log == ["waits", "cancelled", "cancelled"])
    assert await channel.unary_unary("/t.Test/Echo")(b"on") == b"on"


async def test_slow_reader_blocks_the_writer(channel, methods):
    endless = channel.unary_stream("/t.Test/Endless")(b"")
    await until(lambda: methods.log == ["waits"])
    held = await standstill(lambda: methods.written, 300)
    assert held < 300  # 30 MB
    for _ in range(held + 5):
        await endless.read()
    await until(lambda: methods.written > held)
    endless.cancel()


async def test_slow_handler_blocks_the_client(channel, methods):
    sent = 0

    async def messages():
        nonlocal sent
        for _ in range(400):
            yield bytes(100_000)
            sent += 1

    call = channel.stream_unary("/t.Test/ReadSlowly")(messages())
    assert await standstill(lambda: sent, 200) < 200
    methods.gate.set()
    assert await call == b"400"


# Connections.


async def test_too_many_pings(serve, connect, methods):
    server = await serve()
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_time_between_pings_ms", 10),
    ]
    channel = connect(server, options=options)
    code, details = await status_of(channel.unary_unary("/t.Test/Wait")(b""))
    assert code is grpc.StatusCode.UNAVAILABLE and "ping" in details.lower()


async def test_keepalive_keeps_healthy_connections(serve, connect, methods, monkeypatch):
    channel = connect(await serve({"keepalive_time": 0.05, "keepalive_timeout": 60}))
    call = channel.unary_unary("/t.Test/Wait")(b"healthy")
    await until(lambda: methods.log)
    heard, real = [], Keepalive.on_received
    monkeypatch.setattr(Keepalive, "on_received", lambda self: (heard.append(1), real(self))[1])
    await until(lambda: heard)  # the client acknowledged the PING
    methods.gate.set()
    assert await call == b"healthy"


async def test_max_age_replaces_connections_without_failures(serve, connect):
    server = await serve({"max_age": 0.15, "max_age_grace": 5.0})
    echo = connect(server).unary_unary("/t.Test/Echo")
    peers = set()
    while len(peers) < 4:
        assert await asyncio.gather(*(echo(b"x") for _ in range(20))) == [b"x"] * 20
        peers |= set(server._context.connections)


async def test_stop_waits_for_calls_in_flight(serve, connect, methods):
    server = await serve()
    channel = connect(server)
    waiting = asyncio.ensure_future(channel.unary_unary("/t.Test/Wait")(b"done"))
    words = channel.unary_stream("/t.Test/Split")(b"2000 x")
    assert await words.read() == b"x"
    await until(lambda: methods.log == ["waits"])
    stopping = asyncio.ensure_future(server.stop(60))
    await asyncio.sleep(0.1)
    assert not stopping.done()
    methods.gate.set()
    assert await waiting == b"done"
    for _ in range(1999):
        assert await words.read() == b"x"
    assert await words.read() is grpc.aio.EOF
    await asyncio.wait_for(stopping, 60)


async def test_stop_loses_no_requests(serve, connect):
    server = await serve()
    channel = connect(server)
    echo = channel.unary_unary("/t.Test/Echo")
    await echo(b"first")
    calls = [asyncio.ensure_future(echo(b"%d" % i)) for i in range(150)]
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    calls += [asyncio.ensure_future(echo(b"%d" % i)) for i in range(150)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(server.stop(60))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    await asyncio.wait_for(stopping, 60)
    for outcome in outcomes:  # a response, or not sent because the port is closed
        if isinstance(outcome, grpc.aio.AioRpcError):
            assert outcome.code() is grpc.StatusCode.UNAVAILABLE
            assert "refused" in outcome.details().lower(), outcome.details()
    assert any(isinstance(outcome, bytes) for outcome in outcomes)


async def test_stop_aborts_calls_after_the_grace_period(serve, connect, methods):
    server = await serve()
    call = connect(server).unary_unary("/t.Test/Wait")(b"")
    await until(lambda: methods.log == ["waits"])
    await asyncio.wait_for(server.stop(0.2), 60)
    assert methods.log == ["waits", "cancelled"]
    assert (await status_of(call))[0] is grpc.StatusCode.UNAVAILABLE


async def test_tls(serve, methods):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["h2"])
    authority.issue_cert("localhost", not_after=datetime.datetime(2100, 1, 1)).configure_cert(context)
    server = await serve(tls=context)
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with grpc.aio.secure_channel(f"localhost:{server.port}", credentials) as channel:
        body = bytes(3 << 20)
        assert await channel.unary_unary("/t.Test/Echo")(body[:1000]) == body[:1000]
        assert await channel.stream_unary("/t.Test/Join")(iter([body[: 1 << 20]] * 3)) == body
        call = channel.unary_unary("/t.Test/Callback")(b"wait")
        await until(lambda: methods.log == ["waits"])
        stopping = asyncio.ensure_future(server.stop(60))
        call.cancel()
        await asyncio.wait_for(stopping, 50)
        assert methods.log == ["waits", "cancelled"]


async def test_interceptors(serve, connect):
    seen = []

    class Spy(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            seen.append((details.method, dict(details.invocation_metadata).get("k")))
            return await continuation(details)

    class Faulty(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            if dict(details.invocation_metadata).get("k") == "wait":
                await asyncio.sleep(0.01)
            if dict(details.invocation_metadata).get("k") == "raise":
                raise KeyError("lost")
            return await continuation(details)

    channel = connect(await serve(interceptors=(Spy(), Faulty())))
    for path in UNARY:
        assert await channel.unary_unary(path)(b"x", metadata=(("k", "v"),)) == b"x"
    assert seen == [(path, "v") for path in UNARY]
    for bad in ("wait", "raise"):
        code, _ = await status_of(channel.unary_unary(UNARY[0])(b"x", metadata=(("k", bad),)))
        assert code is grpc.StatusCode.UNKNOWN


async def test_ended_calls_are_freed(channel, server, methods, monkeypatch):
    kept = weakref.WeakSet()
    for kind in (CallbackCall, CoroutineCall):
        real = kind.__init__
        monkeypatch.setattr(
            kind, "__init__", lambda self, *args, real=real: (kept.add(self), real(self, *args))[1]
        )
    for path in UNARY:
        echo = channel.unary_unary(path)
        for _ in range(10):
            await asyncio.gather(*(echo(b"x") for _ in range(200)))
        call = echo(b"cancelled")
        call.cancel()
    chat = channel.stream_stream("/t.Test/Chat")()
    await chat.write(b"x")
    await chat.read()
    chat.cancel()
    methods.contexts.clear()
    [connection] = server._context.connections
    await until(lambda: not connection.streams and not server._tasks)

    def gone() -> bool:
        gc.collect()
        return not kept

    await until(gone)
