"""Whether the client of a connection is still there, and whether it asks too often whether we are."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from neso.frontends.http2.frames import ConnectionFault, ErrorCode, ping_frame
from neso.frontends.http2.options import Http2Options

if TYPE_CHECKING:
    from neso.frontends.http2.connection import Http2Connection

_PING = ping_frame(b"neso\0\0\0\0")
_INTERVAL_WITHOUT_STREAMS = 7200.0
_JITTER = 0.1


class Keepalive:
    """Timers of one connection: its greeting, PINGs to a silent client, its age; strikes for PINGs from the client.

    After gRPC's proposals A8 (client side) and A9 (server side).
    """

    def __init__(self, connection: Http2Connection, options: Http2Options) -> None:
        self._connection = connection
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._asked = False
        self._pinged_at: float | None = None
        self._strikes = 0
        self._timer = self._loop.call_later(options.greeting_timeout, connection.abort)
        self._age: asyncio.TimerHandle | None = None
        if options.max_age is not None:
            age = options.max_age * random.uniform(1 - _JITTER, 1 + _JITTER)
            self._age = self._loop.call_later(age, self._grow_old)

    def stop(self) -> None:
        """The connection has ended."""
        self._timer.cancel()
        if self._age is not None:
            self._age.cancel()

    def greeted(self) -> None:
        """The client speaks HTTP/2."""
        self._timer.cancel()
        self._timer = self._loop.call_later(self._options.keepalive_time, self._check)

    def heard(self) -> None:
        """Something came from the client."""
        self._heard_at = self._loop.time()
        self._asked = False

    def sent_data(self) -> None:
        """Headers, data or a window went to the client: it may ask anew whether they arrive."""
        self._strikes = 0
        self._pinged_at = None

    def pinged(self) -> None:
        """The client sent a PING. Raises `ConnectionFault` for one too many."""
        options = self._options
        interval = options.min_ping_interval
        if not self._connection.streams and not options.pings_without_streams:
            interval = _INTERVAL_WITHOUT_STREAMS
        now = self._loop.time()
        before, self._pinged_at = self._pinged_at, now
        if before is None or now - before >= interval:
            return
        self._strikes += 1
        if options.max_ping_strikes and self._strikes > options.max_ping_strikes:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    def _check(self) -> None:
        options = self._options
        silent = self._loop.time() - self._heard_at
        if self._asked:
            self._connection.abort()
        elif silent < options.keepalive_time:
            self._timer = self._loop.call_later(options.keepalive_time - silent, self._check)
        elif self._connection.streams or options.pings_without_streams:
            self._asked = True
            self._connection.output.write(_PING)
            self._timer = self._loop.call_later(options.keepalive_timeout, self._check)
        else:
            self._timer = self._loop.call_later(options.keepalive_time, self._check)

    def _grow_old(self) -> None:
        self._connection.go_away()
        grace = self._options.max_age_grace
        if grace is not None:
            self._age = self._loop.call_later(grace, self._connection.abort)
