"""Handshake timeout, keepalive and maximum age."""

from __future__ import annotations

import asyncio

import pytest
from http2_client import HEAD, frame

from neso.frontends.transport.http2 import ErrorCode, frames

pytestmark = pytest.mark.usefixtures("virtual_time")

PING = frame(frames.PING, 0, 0, b"12345678")
PONG = frame(frames.PING, frames.ACK, 0, b"12345678")


async def test_handshake_timeout(make):
    client = make(handshake_timeout=0.05)
    client.server.data_received(b"PRI")
    await asyncio.sleep(0.1)
    assert client.transport.aborted


async def test_silent_client_gets_a_ping_then_is_disconnected(make):
    client = make(keepalive_time=0.1, keepalive_timeout=0.1).greet()
    client.echo.hold = True
    client.request(b"x")
    for _ in range(3):
        await asyncio.sleep(0.15)
        assert frame(frames.PING, 0, 0, b"neso\0\0\0\0") in bytes(client.transport.written)
        client.pump()  # h2 acknowledges
    await asyncio.sleep(0.3)
    assert client.transport.aborted


async def test_no_keepalive_ping_without_streams(make):
    client = make(keepalive_time=0.03, keepalive_timeout=0.03).greet()
    await asyncio.sleep(0.15)
    assert not client.transport.aborted and not client.transport.written
    asked = make(keepalive_time=0.03, keepalive_timeout=0.03, pings_without_streams=True).greet()
    await asyncio.sleep(0.15)
    assert asked.transport.aborted


async def test_pings_are_acknowledged_and_limited(make):
    client = make().greet()
    client.echo.hold = True
    number = client.request(b"x", end=False)
    for _ in range(3):
        client.server.data_received(PING)
    assert client.transport.take() == PONG * 3
    client.echo.streams[number].send(HEAD, b"data", None)
    for _ in range(3):
        client.server.data_received(PING)  # strikes are reset when data is sent
    client.pump()
    client.raw(PING)
    assert client.goaway() == (ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")


async def test_pings_at_the_allowed_rate(make):
    client = make(min_ping_interval=0.02, pings_without_streams=True).greet()
    for _ in range(5):
        client.server.data_received(PING)
        await asyncio.sleep(0.03)
    assert not client.transport.eof


async def test_ping_interval_without_streams_is_two_hours(make):
    client = make(min_ping_interval=0.0).greet()
    for _ in range(4):
        client.server.data_received(PING)
    assert client.transport.eof


async def test_max_age_closes_the_connection(make):
    client = make(max_age=0.05, max_age_grace=0.1).greet()
    client.echo.hold = True
    client.request(b"x")
    await asyncio.sleep(0.1)
    assert frames.goaway_frame(2**31 - 1, ErrorCode.NO_ERROR) in bytes(client.transport.written)
    assert not client.transport.aborted
    await asyncio.sleep(0.15)
    assert client.transport.aborted
