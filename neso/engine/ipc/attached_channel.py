"""Channel from a front-end process to an engine that the server process has started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from neso.engine.errors import EngineDead
from neso.engine.ipc.channel import EngineChannel
from neso.engine.ipc.messages import Event

CONNECT_TIMEOUT = 10.0
"""Seconds in which an engine must connect; it does so between two steps."""

Attachment = Callable[..., Awaitable[Any]]
"""Calls the server process: `attach()` returns the number of this client and an address to listen at, and
`attach(address)` lets the engine connect to it. Raises `ServerError`."""


class AttachedChannel(EngineChannel):
    """The socket of one of several clients of an engine. The engine has ended when it disconnects."""

    def __init__(self, socket: zmq.asyncio.Socket, client: int) -> None:
        super().__init__(socket)
        self.client = client
        self._monitor: zmq.asyncio.Socket = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._watching = asyncio.create_task(self._watch(), name="engine-monitor")

    @classmethod
    async def open(cls, attach: Attachment) -> AttachedChannel:
        """Let the engine connect. Raises `ServerError` if it is not running."""
        client, address = await attach()
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.bind(address)
        channel = cls(socket, client)
        try:
            await attach(address)
        except BaseException:
            await channel.close(0)
            raise
        return channel

    async def receive_first(self) -> Event:
        try:
            return await asyncio.wait_for(super().receive_first(), CONNECT_TIMEOUT)
        except asyncio.TimeoutError:
            raise EngineDead("the engine does not answer") from None

    async def close(self, timeout: float) -> None:
        """Close the socket; the engine keeps running."""
        self._watching.cancel()
        self._flush()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)

    async def _watch(self) -> None:
        await recv_monitor_message(self._monitor)
        if not self.dead.done():
            self.dead.set_result("the engine process has ended")
