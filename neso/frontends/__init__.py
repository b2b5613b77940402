"""Frontends: the client protocols. They parse requests, call the server and write responses."""

from __future__ import annotations

from typing import Protocol


class Frontend(Protocol):
    """A server of one protocol, on the core's event loop."""

    @property
    def port(self) -> int: ...

    async def start(self) -> None: ...

    async def stop(self, grace: float) -> None: ...
