"""Events of a response as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from neso.frontends.openai.errors import to_api_error
from neso.frontends.openai.responses.json_text import json_text
from neso.frontends.openai.responses.output import Event
from neso.frontends.openai.responses.run import ResponseRun


class EventWriter:
    """Numbers the events of one response and writes them."""

    def __init__(self) -> None:
        self._next = 0

    def write(self, events: Sequence[Event]) -> list[bytes]:
        """The events as they go over the wire."""
        written = []
        for event in events:
            numbered = {"type": event["type"], "sequence_number": self._next, **event}
            written.append(b"event: " + event["type"].encode() + b"\ndata: " + json_text(numbered) + b"\n\n")
            self._next += 1
        return written


async def written_events(run: ResponseRun) -> AsyncGenerator[list[bytes], None]:
    """The events of `run`, as they go over the wire, those of one step together.

    Raises what comes before the first event; an error after it is told by the last event.
    """
    writer = EventWriter()
    begun = False
    async with aclosing(run.events()) as steps:
        try:
            async for events in steps:
                yield writer.write(events)
                begun = True
        except Exception as error:
            if not begun:
                raise
            yield writer.write(run.failed(to_api_error(error)))
