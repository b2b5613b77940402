"""Fixtures: servers on free ports, and channels to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import pytest
import uvloop
from grpc_methods import LARGE, Methods

from neso.frontends.transport.grpc import GrpcServer, GrpcServerOptions
from neso.frontends.transport.http2 import Http2Options


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """Run every test on both event loops: their transports differ in when they write, close and raise."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
async def methods() -> Methods:
    return Methods()


@pytest.fixture
async def serve(methods: Methods) -> AsyncIterator[Callable[..., Awaitable[GrpcServer]]]:
    servers: list[GrpcServer] = []

    async def start(
        http2: dict[str, Any] | None = None, interceptors: tuple[Any, ...] = (), **options: Any
    ) -> GrpcServer:
        server = GrpcServer(GrpcServerOptions(http2=Http2Options(**(http2 or {})), **options), interceptors)
        server.add_registered_method_handlers("t.Test", methods.handlers())
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop(0)
        assert not server._tasks
        assert not server._context.connections


@pytest.fixture
async def server(serve: Callable[..., Awaitable[GrpcServer]]) -> GrpcServer:
    return await serve()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., grpc.aio.Channel]]:
    channels: list[grpc.aio.Channel] = []

    def open_channel(server: GrpcServer, **arguments: Any) -> grpc.aio.Channel:
        options = [*LARGE, ("grpc.use_local_subchannel_pool", 1), *arguments.pop("options", [])]
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options, **arguments))
        return channels[-1]

    yield open_channel
    for channel in channels:
        await channel.close()


@pytest.fixture
async def channel(server: GrpcServer, connect: Callable[..., grpc.aio.Channel]) -> grpc.aio.Channel:
    return connect(server)
