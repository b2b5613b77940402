"""Responses that are kept for later requests, in the memory of this process."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from neso.frontends.openai.responses.chat_conversion import Item
from neso.frontends.openai.responses.output_items import json_text
from neso.frontends.openai.responses.run import Response


@dataclass(eq=False)
class EventLog:
    """The events of a response as they go to clients, for those who come, or come back, later."""

    events: list[bytes] = field(default_factory=list)
    ended: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, *events: bytes) -> None:
        self.events += events
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from the number `start` on, up to the last."""
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self.ended:
                return
            await self._news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


@dataclass(eq=False)
class StoredResponse:
    """A response and what it was made of: `context`, the items that the model was given, oldest first.

    `owner` is whose API key it was made with: only that one may ask for it. `task` makes it in the
    background; `log` has its events, if it was asked for as a stream.
    """

    response: Response
    context: list[Item]
    owner: str = ""
    task: asyncio.Task[None] | None = None
    log: EventLog | None = None
    size: int = 0

    def measure(self) -> int:
        """Note how many bytes it takes as JSON, about what it takes in memory."""
        self.size = len(json_text([self.response.as_dict(), self.context]))
        if self.log is not None:
            self.size += sum(map(len, self.log.events))
        return self.size


class ResponseStore:
    """Keeps at most `max_responses` of together at most `max_bytes`; the one not used for longest goes first.

    Those that are still being made are kept, however many they are.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def keeps_any(self) -> bool:
        """Whether a response can be kept at all."""
        return self._max_responses > 0 and self._max_bytes > 0

    def put(self, stored: StoredResponse) -> None:
        """Keep it, or note that it has grown."""
        self._bytes += -stored.size + stored.measure()
        self._stored[stored.response.id] = stored
        self._stored.move_to_end(stored.response.id)
        self._make_room()

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """The response of that id, if it is `owner`'s; it counts as used now."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._stored.move_to_end(response_id)
        return stored

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def remove(self, response_id: str) -> None:
        """Forget it."""
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size

    def unfinished(self) -> list[StoredResponse]:
        """Those that are still being made."""
        return [stored for stored in self._stored.values() if not stored.response.has_ended]

    def _make_room(self) -> None:
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            ended = (key for key, stored in self._stored.items() if stored.response.has_ended)
            oldest = next(ended, None)
            if oldest is None:
                return
            self.remove(oldest)
