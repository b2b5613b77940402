"""Limits on the number of connections, shared by HTTP and gRPC servers."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
import pytest
from eventually import until

from neso.frontends.transport.grpc import GrpcServer, GrpcServerOptions
from neso.frontends.transport.http1 import HttpServer, HttpServerOptions, Response
from neso.frontends.transport.tcp import ConnectionLimits, client_network


class Peer(asyncio.BaseTransport):
    """A transport with a peer name."""

    def __init__(self, name: object) -> None:
        super().__init__()
        self._name = name

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._name if name == "peername" else default


def test_connections_in_all():
    limits = ConnectionLimits(max_connections=2, max_per_address=10)
    first = limits.admit(Peer(("10.0.0.1", 1)))
    assert first and limits.admit(Peer(("10.0.0.2", 1)))
    assert limits.admit(Peer(("10.0.0.3", 1))) is None
    first.release()
    assert limits.admit(Peer(("10.0.0.3", 1)))


@pytest.mark.parametrize(
    ("same", "other"),
    [
        (["10.0.0.1", "::ffff:10.0.0.1"], "10.0.0.2"),
        (["2001:db8::1", "2001:db8::ffff:1"], "2001:db8:0:1::1"),
        (["fe80::1%eth0", "fe80::2%eth1"], "10.0.0.1"),
    ],
)
def test_connections_of_one_address(same, other):
    limits = ConnectionLimits(max_connections=10, max_per_address=2)
    admitted = [limits.admit(Peer((host, 5, 0, 0))) for host in same]
    assert all(admitted)
    assert limits.admit(Peer((same[0], 6))) is None
    assert limits.admit(Peer((other, 6)))
    admitted[1].release()
    assert limits.admit(Peer((same[1], 7)))


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("not an address", ""),
    ],
)
def test_clients_of_one_network_have_one_name(host, name):
    assert client_network(host) == name
    admission = ConnectionLimits().admit(Peer((host, 5)))
    assert admission is not None
    assert admission.address == name


@pytest.mark.parametrize("name", [None, "", "/run/socket", ("not an address", 1)])
def test_sockets_without_an_ip_address_count_in_all(name):
    limits = ConnectionLimits(max_connections=3, max_per_address=1)
    assert [limits.admit(Peer(name)) is not None for _ in range(4)] == [True] * 3 + [False]


async def http_status(server: HttpServer) -> tuple[bytes, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    return (await asyncio.wait_for(reader.readline(), 60)).strip(), writer


async def test_http_and_grpc_servers_share_limits():
    limits = ConnectionLimits(max_connections=100, max_per_address=2)
    http = HttpServer(lambda request: Response(b"ok"), HttpServerOptions(), limits)
    rpc = GrpcServer(GrpcServerOptions(), limits=limits)
    await http.start()
    await rpc.start()
    status, first = await http_status(http)
    assert status == b"HTTP/1.1 200 OK"
    _, second = await asyncio.open_connection("127.0.0.1", rpc.port)
    await until(lambda: rpc._context.connections)

    status, refused = await http_status(http)
    assert status == b"HTTP/1.1 503 Service Unavailable"
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{rpc.port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/a/b")(b"")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

        second.close()  # makes room
        call = channel.unary_unary("/a/b")(b"", wait_for_ready=True, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    for writer in (first, refused):
        writer.close()
    await http.stop(1)
    await rpc.stop(1)
    assert limits.admit(Peer(("127.0.0.1", 1))) and limits.admit(Peer(("127.0.0.1", 2)))  # none is counted
