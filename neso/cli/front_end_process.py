"""A front-end process of `neso serve --server-processes N`: `python -m neso.cli.front_end_process SOCKET_FD`.

Started by the main process, with one end of a socket pair. Ends with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import uvloop

from neso.cli.server_process import EXIT_GRACE, FrontEndSetup, exit_after, start_frontends
from neso.server.errors import ServerError
from neso.server.log import configure_log
from neso.server.memory import freeze_gc
from neso.server.processes.channel import Channel
from neso.server.processes.front_end_core import FrontEndCore
from neso.server.processes.messages import Message
from neso.server.processes.state import ModelDescription, ServerState

if TYPE_CHECKING:
    from neso.frontends import Frontend

logger = logging.getLogger("neso")


class FrontEndProcess:
    """Serves clients on the shared ports, and executes the operations that the main process calls."""

    def __init__(self) -> None:
        self._frontends: dict[str, Frontend] = {}
        self._core: FrontEndCore | None = None
        self._has_core = asyncio.Event()
        self._options: Any = None
        self._stopped = asyncio.Event()

    async def run(self, sock: socket.socket) -> int:
        """Serve until the main process ends this one. Returns the exit status."""
        operations: dict[str, Any] = {
            "apply": self._apply,
            "drain": self._drain,
            "reload_keys": self._reload_keys,
            "send_totals": self._send_totals,
            "stop": self._stop,
        }
        channel = await Channel.open(sock, operations, self._on_message, self._on_lost)
        setup, state, news = await channel.call("setup")
        assert isinstance(setup, FrontEndSetup)
        configure_log(setup.options.log)
        self._options = setup.options
        core = self._core = FrontEndCore(setup.options.server, setup.admission())
        core.forwarder.channel = channel
        try:
            await core.apply(state, news)
            self._has_core.set()
            await start_frontends(core, setup.options, self._frontends, setup.connection_limits())
        except (ServerError, OSError, ValueError) as error:
            await channel.call("failed", str(error))
            return 1
        freeze_gc()
        await channel.call("listening")
        reporting = asyncio.create_task(core.report_totals())
        await self._stopped.wait()
        reporting.cancel()
        return 0

    def _on_message(self, message: Message) -> None:
        assert self._core is not None
        self._core.forwarder.receive(message)

    def _on_lost(self) -> None:
        """The main process has ended, or has closed the channel after `stop`."""
        if not self._stopped.is_set():
            os._exit(1)

    async def _ready_core(self) -> FrontEndCore:
        await self._has_core.wait()
        assert self._core is not None
        return self._core

    async def _apply(self, state: ServerState, news: Iterable[ModelDescription]) -> None:
        await (await self._ready_core()).apply(state, news)

    async def _drain(self, key: int, timeout: float | None) -> None:
        await (await self._ready_core()).drain(key, timeout)

    async def _send_totals(self) -> None:
        await (await self._ready_core()).send_totals()

    def _reload_keys(self) -> None:
        openai = self._options.openai if self._options is not None else None
        if openai is not None and openai.access.keys is not None:
            openai.access.keys.reload(force=True)

    async def _stop(self, grace: float) -> None:
        core = await self._ready_core()
        exit_after(grace + EXIT_GRACE)
        await asyncio.gather(*(frontend.stop(grace) for frontend in self._frontends.values()))
        await core.send_totals()
        await core.stop(1.0)
        asyncio.get_running_loop().call_later(0.1, self._stopped.set)


def main(descriptor: str) -> int:
    # A signal to the process group, as by Ctrl-C, reaches the main process, which then stops this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return uvloop.run(FrontEndProcess().run(socket.socket(fileno=int(descriptor))))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
