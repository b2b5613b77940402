"""What the connections of one server have in common."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from neso.frontends.http.clock import Clock
from neso.frontends.http.handler import Handler
from neso.frontends.http.options import HttpServerOptions
from neso.frontends.http.response import response_head

if TYPE_CHECKING:
    from neso.frontends.http.connection import HttpConnection


class Shared:
    """The handler and the options, the clock, and who is there."""

    def __init__(self, handler: Handler, options: HttpServerOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.handler = handler
        self.options = options
        self.loop = loop
        self.clock = Clock()
        self.connections: set[HttpConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        self.idle = asyncio.Event()  # set when the last connection ends while draining
        self._heads: dict[tuple[int, str | None], bytes] = {}

    def tick(self) -> None:
        """Advance the clock; the heads made so far tell an old time."""
        self.clock.tick()
        self._heads.clear()

    def plain_head(self, status: int, content_type: str | None) -> bytes:
        """The head of a response without further headers, up to the number of its Content-Length."""
        head = self._heads.get((status, content_type))
        if head is None:
            whole = response_head(status, content_type, (("content-length", ""),), None, self.clock.date, "")
            head = self._heads[status, content_type] = whole.removesuffix(b"\r\n\r\n")
        return head
