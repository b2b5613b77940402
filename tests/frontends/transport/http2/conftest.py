"""Fixtures: connections, each with its client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from http2_client import Client

from neso.frontends.transport.http2 import Http2Options


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Client]]:
    clients: list[Client] = []

    def client(**options: Any) -> Client:
        clients.append(Client(Http2Options(**{"turn": 60.0, **options})))  # tests send floods in one piece
        return clients[-1]

    yield client
    for each in clients:
        if each.server in each.context.connections:
            each.server.connection_lost(None)
        assert not each.server.streams
        assert not each.context.connections
        assert not each.context.memory.used


@pytest.fixture
async def client(make: Callable[..., Client]) -> Client:
    return make().greet()
