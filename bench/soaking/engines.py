"""Kills engine processes of the server during the soak test."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import psutil

from soaking.loads import Clients
from soaking.models import GUEST_BLOCKS
from soaking.server import SoakServer

VICTIMS = ("pilot", "cancelled")
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
"""A stopped process is found by its missing heartbeat."""


class Killer:
    """Sends one of `SIGNALS` to an engine every `period` seconds. `count`: number of kills."""

    def __init__(self, clients: Clients, period: float) -> None:
        self._clients, self._period = clients, period
        self._random = random.Random(0)
        self.count = 0

    async def run(self, end: float) -> None:
        """Kill until `end`, the last time early enough for the restart to be part of the run."""
        while (left := end - self._period - time.monotonic()) > 0:
            await asyncio.sleep(min(self._period, left))
            # An engine that is killed while it starts is a failed start, not a restart.
            if await self._all_ready():
                victim = self._random.choice(victims_of(self._clients.server))
                victim.send_signal(SIGNALS[self.count % len(SIGNALS)])
                self.count += 1

    async def _all_ready(self) -> bool:
        for model in VICTIMS:
            url = self._clients.server.url(f"/v2/models/{model}/ready")
            async with self._clients.http.get(url) as response:
                if response.status != 200:
                    return False
        return True


def victims_of(server: SoakServer) -> list[psutil.Process]:
    """Return the engine processes of the server, except that of `guest`, which is loaded and unloaded by clients."""
    found = []
    for child in psutil.Process(server.pid).children():
        try:
            command = child.cmdline()
        except psutil.Error:  # it has ended
            continue
        if "neso.engine.ipc.engine_process" in command and f'"num_blocks":{GUEST_BLOCKS}' not in command[-1]:
            found.append(child)
    return found
