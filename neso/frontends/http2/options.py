"""What an HTTP/2 server is told of limits and keepalive."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Http2Options:
    """Sizes are bytes, times are seconds.

    `max_streams`: of a connection, at a time. `max_queued`: while more of the responses of a connection than this wait
    for the client, its new requests are refused. `write_timeout`: a client that reads nothing for so long, while the
    `write_buffer` is full, is cut off. `greeting_timeout`: so long may a new connection say nothing.

    `keepalive_time`: after so long without a byte from the client it is sent a PING, and has `keepalive_timeout` to
    answer. A client that sends PINGs itself more often than every `min_ping_interval` while it gets no data, more than
    `max_ping_strikes` times, is cut off; without streams the interval is two hours, and no PINGs are sent, unless
    `pings_without_streams`. `max_age`: connections are closed gracefully then (give or take a tenth, so that not all
    clients come back at once), and for good after `max_age_grace`; None: never.
    """

    max_header_list: int = 64 << 10
    max_frame: int = 128 << 10
    max_streams: int = 1 << 16
    max_queued: int = 1 << 30
    stream_window: int = 4 << 20
    connection_window: int = 16 << 20
    write_buffer: int = 256 << 10
    write_timeout: float = 60.0
    greeting_timeout: float = 20.0
    keepalive_time: float = 7200.0
    keepalive_timeout: float = 20.0
    min_ping_interval: float = 300.0
    max_ping_strikes: int = 2
    pings_without_streams: bool = False
    max_age: float | None = None
    max_age_grace: float | None = None
