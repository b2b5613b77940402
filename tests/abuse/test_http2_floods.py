"""HTTP/2 frames and connections that cost the server more than the client."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from attack import AttackedServer, write_identity_model
from raw_http2 import INFER, RawHttp2, body, frame, request

from neso.frontends.transport.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    ErrorCode,
)

pytestmark = pytest.mark.alone

CALM = ErrorCode.ENHANCE_YOUR_CALM
CANCEL = ErrorCode.CANCEL.to_bytes(4, "big")
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def flood(
    server: AttackedServer, data: bytes, *, start: bytes = b"", connections: int = 4
) -> list[int | None]:
    """Send on several connections until the server closes each; return the codes of their GOAWAY frames."""
    clients = [RawHttp2(server.ports["grpc"]) for _ in range(connections)]

    def send(client: RawHttp2) -> None:
        client.send(start)
        while client.send(data) and not client.closed.is_set():
            pass

    threads = [threading.Thread(target=send, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for client, thread in zip(clients, threads, strict=True):
        assert client.closed.wait(60), "the server accepts the flood"
        client.close()
        thread.join(60)
    return [client.goaway for client in clients]


FLOODS = {
    "PING": frame(PING, 0, 0, bytes(8)) * 10_000,
    "PING with ACK": frame(PING, 1, 0, bytes(8)) * 10_000,
    "SETTINGS": frame(SETTINGS, 0, 0) * 10_000,
    "SETTINGS with ACK": frame(SETTINGS, 1, 0) * 10_000,
    "large SETTINGS": frame(SETTINGS, 0, 0, b"\0\x08\0\0\0\1" * 2700) * 20,
    "PRIORITY": frame(PRIORITY, 0, 1, bytes(5)) * 10_000,
    "unknown type": frame(0x42, 0, 0) * 10_000,
}


@pytest.mark.parametrize("name", FLOODS)
def test_control_frames(identity_server, name):
    def run() -> None:
        assert set(flood(identity_server, FLOODS[name])) <= {
            CALM,
            None,
        }  # None: it was lost with the connection

    identity_server.attack(run, f"flood of {name}").check()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("empty DATA", frame(DATA, 0, 1) * 10_000),
        ("empty CONTINUATION", frame(CONTINUATION, 0, 1) * 10_000),
        ("large CONTINUATION", frame(CONTINUATION, 0, 1, bytes(16_384)) * 100),
    ],
)
def test_frames_of_a_stream(identity_server, name, data):
    start = request(1) if name == "empty DATA" else request(1, flags=0)

    def run() -> None:
        assert set(flood(identity_server, data, start=start)) <= {CALM, None}

    identity_server.attack(run, f"flood of {name}").check()


def test_rapid_reset(identity_server):
    """Calls that are cancelled at once."""
    pairs = b"".join(request(n) + frame(RST_STREAM, 0, n, CANCEL) for n in range(1, 40_001, 2))

    def run() -> None:
        for _ in range(3):
            with RawHttp2(identity_server.ports["grpc"]) as client:
                client.send(pairs)
                assert client.closed.wait(60)

    identity_server.attack(run, "rapid reset, 20,000 calls three times").check()


def test_settings_with_many_streams(identity_server):
    """SETTINGS change the window of every open stream."""

    def run() -> None:
        with RawHttp2(identity_server.ports["grpc"]) as client:
            client.send(b"".join(request(n, STREAM) for n in range(1, 501, 2)))
            changes = [frame(SETTINGS, 0, 0, b"\0\4\0\0\0" + bytes([n % 2])) for n in range(1000)]
            client.send(b"".join(changes))
            assert client.closed.wait(60)
            assert client.goaway == CALM

    identity_server.attack(run, "SETTINGS with 250 open streams").check()


def test_streams_beyond_the_limit(identity_server):
    def run() -> None:
        with RawHttp2(identity_server.ports["grpc"]) as client:
            for first in range(1, 120_001, 2000):
                if not client.send(b"".join(request(n, STREAM) for n in range(first, first + 2000, 2))):
                    break
            assert client.closed.wait(60)

    identity_server.attack(run, "60,000 streams of one connection").check()


def test_large_header_blocks(identity_server):
    """Header blocks of 15 KiB, Huffman-coded, that never repeat."""
    calls = [
        request(n, "/nowhere", END_HEADERS | END_STREAM, x=f"{n:08}" + "é" * 3500) for n in range(1, 2001, 2)
    ]

    def run() -> None:
        clients = [RawHttp2(identity_server.ports["grpc"]) for _ in range(4)]
        threads = [threading.Thread(target=c.send, args=(b"".join(calls),), daemon=True) for c in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for client in clients:
            deadline = time.monotonic() + 60
            while (
                len([f for f in client.frames if f[0] == HEADERS]) < len(calls) and not client.closed.is_set()
            ):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            client.close()

    identity_server.attack(run, "4000 header blocks of 7 KiB").check()


def test_window_updates_of_one_byte(identity_server):
    """A response that may be sent one byte at a time."""
    updates = frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") * 50_000

    def run() -> None:
        with RawHttp2(identity_server.ports["grpc"], settings=b"\0\4\0\0\0\0") as client:
            client.send(request(1, "/inference.GRPCInferenceService/ServerMetadata"))
            client.send(body(1, bytes(5)))
            client.send(updates)
            client.send(frame(PING, 0, 0, bytes(8)))
            deadline = time.monotonic() + 60
            while not any(f[0] == PING for f in client.frames) and not client.closed.is_set():
                assert time.monotonic() < deadline
                time.sleep(0.01)

    identity_server.attack(run, "50,000 WINDOW_UPDATEs of one byte").check()


# Memory of unfinished requests.


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    """A server with 64 MiB for requests in flight, 40 connections, and 30 of one address."""
    repository: Path = tmp_path_factory.mktemp("repository")
    write_identity_model(repository)
    flags = ("--grpc-max-memory=67108864", "--grpc-max-connection-memory=33554432")
    limits = ("--max-connections=40", "--max-connections-per-address=30")
    with AttackedServer(*flags, *limits, repository=repository) as server:
        yield server


def messages_that_never_end(size: int, calls: int) -> list[bytes]:
    """Calls that announce messages of 16 MiB, but send only the first `size` bytes."""
    start = b"\0" + (16 << 20).to_bytes(4, "big") + bytes(size)
    return [request(n) + body(n, start, end=False) for n in range(1, 2 * calls, 2)]


def test_unfinished_messages(small_server):
    """10 connections with 200 calls, each with almost a window of data."""
    calls = messages_that_never_end(900_000, 200)

    def run() -> None:
        clients = [RawHttp2(small_server.ports["grpc"]) for _ in range(10)]
        threads = [
            threading.Thread(target=lambda client=client: [client.send(call) for call in calls], daemon=True)
            for client in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        time.sleep(1)
        for client in clients:
            client.close()

    small_server.attack(run, "2000 unfinished messages of 900 KB").check(limit_mib=64)
    with grpc.insecure_channel(small_server.address("grpc")) as channel:  # the memory is free again
        method = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert method(b"", wait_for_ready=True, timeout=60) == b"\x08\x01"


def test_reserved_memory_of_silent_clients(small_server):
    """Clients that announce large messages and send nothing do not keep others from sending small ones."""

    def run() -> None:
        clients = [RawHttp2(small_server.ports["grpc"]) for _ in range(10)]
        for client in clients:
            client.send(b"".join(messages_that_never_end(100, 5)))
        with grpc.insecure_channel(small_server.address("grpc")) as channel:
            for _ in range(20):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.unary_unary(INFER)(b"\x0a\x01x", timeout=60)
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        for client in clients:
            client.close()

    small_server.attack(run, "50 announced messages of 16 MiB").check(limit_mib=64)


# Connections.


def open_connections(
    port: int, count: int, first_bytes: bytes = b"", source: str = "127.0.0.1"
) -> list[socket.socket]:
    opened = []
    for _ in range(count):
        opened.append(socket.create_connection(("127.0.0.1", port), 60, (source, 0)))
        opened[-1].sendall(first_bytes)
    return opened


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_connections_of_one_address(small_server, protocol):
    """300 connections from 127.0.0.2 leave room for the probe, which comes from 127.0.0.1."""

    def run() -> None:
        opened = open_connections(small_server.ports[protocol], 300, b"P", "127.0.0.2")
        time.sleep(0.5)
        alive = [each for each in opened if not readable(each)]
        assert len(alive) <= 30
        for each in opened:
            each.close()

    small_server.attack(run, f"300 {protocol} connections of one address").check()


def readable(connection: socket.socket) -> bool:
    """Whether the server has sent something or closed the connection."""
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_idle_connections(identity_server):
    """1000 connections that send nothing, then garbage."""
    wait: Callable[[float], None] = time.sleep

    def run() -> None:
        opened = open_connections(identity_server.ports["grpc"], 1000, b"", "127.0.0.2")
        wait(0.5)
        for each in opened:
            each.sendall(b"\xff" * 1000)
        wait(0.5)
        for each in opened:
            each.close()

    identity_server.attack(run, "1000 idle connections").check()
