"""Stored responses, in process memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from neso.frontends.openai.responses.chat_conversion import Item
from neso.frontends.openai.responses.output_items import dump_json
from neso.frontends.openai.responses.run import Response


@dataclass(eq=False)
class EventLog:
    """The encoded events of a response, for clients that connect later or reconnect."""

    events: list[bytes] = field(default_factory=list)
    ended: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, *events: bytes) -> None:
        self.events += events
        self._notify()

    def end(self) -> None:
        self.ended = True
        self._notify()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yield the events from index `start` as they arrive, until the last event."""
        while True:
            while start < len(self.events):
                yield self.events[start]
                start += 1
            if self.ended:
                return
            await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


@dataclass(eq=False)
class StoredResponse:
    """A response with its conversation.

    context: input items of the model, oldest first.
    owner: `ApiKey.owner` of the key that created the response; other keys have no access.
    task: generates the response in the background.
    log: its events if it is a background stream.
    size: bytes of its JSON, as an estimate of its memory.
    """

    response: Response
    context: list[Item]
    owner: str = ""
    task: asyncio.Task[None] | None = None
    log: EventLog | None = None
    size: int = 0

    def update_size(self) -> int:
        self.size = len(dump_json([self.response.as_dict(), self.context]))
        if self.log is not None:
            self.size += sum(map(len, self.log.events))
        return self.size


class ResponseStore:
    """Stores up to `max_responses` responses and `max_bytes` bytes; evicts the least recently used.

    Responses in progress are never evicted.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    @property
    def is_enabled(self) -> bool:
        """Whether the capacity is greater than zero."""
        return self._max_responses > 0 and self._max_bytes > 0

    def put(self, stored: StoredResponse) -> None:
        """Add a response, or update its size."""
        self._bytes += -stored.size + stored.update_size()
        self._stored[stored.response.id] = stored
        self._stored.move_to_end(stored.response.id)
        while len(self._stored) > self._max_responses or self._bytes > self._max_bytes:
            oldest = next((key for key, entry in self._stored.items() if entry.response.has_ended), None)
            if oldest is None:
                return
            self.remove(oldest)

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        """Return the response with that id if it belongs to `owner`. Marks it as recently used."""
        stored = self._stored.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._stored.move_to_end(response_id)
        return stored

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._stored

    def remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id, None)
        if stored is not None:
            self._bytes -= stored.size

    def in_progress(self) -> list[StoredResponse]:
        return [stored for stored in self._stored.values() if not stored.response.has_ended]
