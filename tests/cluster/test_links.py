"""Messages over core NATS without NATS: order, numbers, parts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from eventually import until

from neso.cluster.jetstream.connection import NatsOptions
from neso.cluster.jetstream.links import UNREACHABLE_SECONDS, Links


class Network:
    """Passes messages to the subscriptions of their subjects. `lose`: number of messages that get lost from now on."""

    def __init__(self) -> None:
        self.max_payload = 2048
        self.lose = 0
        self.sizes: list[int] = []
        self._subscriptions: dict[str, Any] = {}
        self._inboxes = 0

    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"inbox{self._inboxes}"

    async def subscribe(self, subject: str, cb: Any, **limits: int) -> None:
        self._subscriptions[subject.removesuffix(".*")] = cb

    async def publish(self, subject: str, data: bytes, reply: str = "") -> None:
        self.sizes.append(len(data))
        if self.lose:
            self.lose -= 1
            return
        receive = self._subscriptions.get(subject.rpartition(".")[0])
        if receive is not None:
            await receive(SimpleNamespace(subject=subject, data=data))
        else:
            await self._subscriptions[reply.rpartition(".")[0]](SimpleNamespace(subject=reply, data=b""))


@pytest.fixture
async def network() -> Network:
    return Network()


async def links(network: Network, name: str, inbound: str, outbound: str) -> Links:
    connection: Any = SimpleNamespace(client=network, prefix="neso.q")
    links = Links(connection, name, inbound, outbound)
    await links.open()
    return links


async def test_messages_arrive_in_order_and_large_ones_in_parts(network: Network):
    server, worker = (
        await links(network, "s", "server", "worker"),
        await links(network, "w", "worker", "server"),
    )
    server.send("w", b"hello", start=True)
    server.send("w", bytes(range(256)) * 40)
    server.send("w", b"end")
    received = [await worker.receive() for _ in range(3)]
    assert received == [("s", b"hello"), ("s", bytes(range(256)) * 40), ("s", b"end")]
    assert len(network.sizes) > 10 and max(network.sizes) <= network.max_payload


@pytest.mark.parametrize("large", [False, True])
async def test_lost_messages_are_noticed_and_the_link_begins_again(network: Network, large: bool):
    server, worker = (
        await links(network, "s", "server", "worker"),
        await links(network, "w", "worker", "server"),
    )
    server.send("w", b"hello", start=True)
    assert await worker.receive() == ("s", b"hello")
    network.lose = 1
    server.send("w", b"x" * (9000 if large else 1))
    server.send("w", b"next")
    assert await worker.receive() == ("s", None)
    server.send("w", b"again", start=True)
    server.send("w", b"more")
    seen = []
    while not seen or seen[-1] != b"more":
        seen.append((await worker.receive())[1])
    assert seen[-2:] == [b"again", b"more"] and None not in seen


async def test_peer_that_nobody_reaches_has_gone(network: Network, monkeypatch: pytest.MonkeyPatch):
    server = await links(network, "s", "server", "worker")
    assert server.send("w", b"hello")
    loop = asyncio.get_running_loop()
    await until(lambda: server._peers["w"].unreachable is not None)
    assert server.send("w", b"hello")  # it may be connecting again
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now + UNREACHABLE_SECONDS + 1)
    assert not server.send("w", b"hello")
    assert server.silence("unknown") == float("inf")


def test_secrets_of_addresses_are_not_shown():
    options = NatsOptions(urls="nats://user:secret@one:4222,tls://token@two", queue="q")
    assert options.shown == "nats://one:4222,tls://two"
