"""Server-sent events."""

from __future__ import annotations

from neso.perf.endpoints.base import HttpEndpoint
from neso.perf.records import RequestRecord

_USAGE = b'"usage":{'


class ServerSentEvents:
    """Splits a body into events and passes their data to the endpoint.

    Fast path: when the text of responses is not kept, an event whose JSON has `endpoint.text_key` once, with a text
    that is not empty, and no usage only needs its arrival time. A quote within a JSON string is escaped, so the key,
    with its quotes, cannot be part of a text. All other events are parsed by `endpoint.event`.
    """

    def __init__(self, endpoint: HttpEndpoint) -> None:
        self._endpoint = endpoint
        self._key = endpoint.text_key
        self._empty_text = endpoint.text_key + b'"'
        self._rest = b""

    def read(self, data: bytes, record: RequestRecord, now: int) -> None:
        """Read a part of the body that arrived at `now`. Raises what `endpoint.event` raises."""
        if self._rest:
            data = self._rest + data
        held = b""
        if b"\r" in data:
            if data[-1:] == b"\r":  # its line feed may follow
                data, held = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n")
        events = data.split(b"\n\n")
        self._rest = events.pop() + held
        key = self._key if record.output_text is None else b""
        for event in events:
            if (
                key
                and event.count(key) == 1
                and self._empty_text not in event
                and _USAGE not in event
                and event[0] != 0x3A  # a comment
            ):
                record.arrivals_ns.append(now)
                if not record.first_output_ns:
                    record.first_output_ns = now
                continue
            content = event_data(event)
            if content and content != b"[DONE]":
                self._endpoint.event(record, content, now)

    def clear(self) -> None:
        """Prepare for the next response."""
        self._rest = b""


def event_data(event: bytes) -> bytes:
    """Return the data of an event; b"" for a comment. The lines of several `data` fields are joined."""
    if event[:6] == b"data: " and b"\n" not in event:
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines)
