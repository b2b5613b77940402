"""What an HTTP server is told: where it listens, how much it takes, how long it waits."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass

from neso.frontends.http.response import error_body


def _error(status: int, message: str) -> bytes:
    return error_body(message)


@dataclass(frozen=True, slots=True)
class HttpServerOptions:
    """Port 0 takes any free one; `HttpServer.port` tells which. Sizes are bytes, times are seconds.

    `header_timeout` runs from the first byte of a request to the end of its headers, whatever trickles in;
    `body_timeout` is the longest pause within a body; `write_timeout` the longest that a client may leave the
    write buffer full; `linger` how long a refused client may go on sending so that it can read the refusal.
    `refusal_body(status, message)`: the JSON body of what is refused before it reaches the handler.
    `tls`: serve over TLS; its handshake has the header's time. `reuse_port`: share the port with other processes.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_body: int = 64 << 20
    max_head: int = 64 << 10
    max_pipelined: int = 16
    write_buffer: int = 256 << 10
    keep_alive_timeout: float = 75.0
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    write_timeout: float = 120.0
    linger: float = 2.0
    backlog: int = 2048
    reuse_port: bool = False
    tls: ssl.SSLContext | None = None
    refusal_body: Callable[[int, str], bytes] = _error

    @property
    def tick(self) -> float:
        """How often the timeouts are looked at: no timer per connection, one for all."""
        shortest = min(
            self.keep_alive_timeout, self.header_timeout, self.body_timeout, self.write_timeout, self.linger
        )
        return min(1.0, max(0.01, shortest / 4))
