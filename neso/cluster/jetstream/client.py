"""A client of NATS that never gives up its connection. Needs nats-py."""

from __future__ import annotations

import asyncio

from nats.aio.client import Client
from nats.errors import Error

RECONNECT_SECONDS = 0.25
MAX_DELAY = 10.0
"""Seconds between two attempts to connect to servers that refuse this client."""


class ReconnectingClient(Client):
    """Connects again after every error. `Client` closes for good after some, for example when credentials expire.

    - failures: number of attempts since the connection was lost; reset it when there is one again
    """

    failures = 0

    async def _process_err(self, err_msg: str) -> None:
        """After an error that ends the connection, the server closes it, which lets `Client` connect again."""
        await self._error_cb(Error(f"nats: {err_msg.strip(chr(39))}"))

    async def _select_next_server(self) -> None:
        if self.is_reconnecting:
            failures, self.failures = self.failures, self.failures + 1
            if failures:
                await asyncio.sleep(min(MAX_DELAY, RECONNECT_SECONDS * 2 ** min(failures, 16)))
        await super()._select_next_server()
