"""Send raw bytes to an HTTP server and read the responses."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass, field

import httptools

TIMEOUT = 30.0


@dataclass
class Reply:
    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False


class _Reader:
    """Collects responses parsed by httptools; raises if the bytes are not HTTP."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.replies.append(Reply())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.replies[-1].headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.replies[-1].status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        self.replies[-1].body += part

    def on_message_complete(self) -> None:
        self.replies[-1].complete = True


def exchange(
    port: int, pieces: list[bytes], *, expected: int, read: bool = True, patience: float | None = None
) -> list[Reply]:
    """Send the pieces, one write each, and read until the server closes or `expected` responses arrived.

    `read=False`: disconnect immediately. Raises `TimeoutError` if the server neither responds nor closes; with
    `patience` (seconds) it may be waiting for more data, so the client disconnects instead.
    """
    reader = _Reader()
    with socket.create_connection(("127.0.0.1", port), timeout=patience or TIMEOUT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                connection.sendall(piece)
        if not read:
            return []
        while sum(reply.complete for reply in reader.replies) < expected:
            try:
                data = connection.recv(65536)
            except ConnectionError:
                break
            except TimeoutError:
                if patience is None:
                    raise
                break
            if not data:
                break
            reader.feed(data)
    return [reply for reply in reader.replies if not 100 <= reply.status < 200]
