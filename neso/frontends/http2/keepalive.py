"""Whether the client of a connection is still there, and whether it asks too often whether we are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from neso.frontends.http2.frames import PING, ErrorCode, frame_header
from neso.frontends.http2.options import Http2Options

if TYPE_CHECKING:
    from neso.frontends.http2.connection import Http2Connection

_PING = frame_header(8, PING, 0, 0) + b"neso\0\0\0\0"
_INTERVAL_WITHOUT_STREAMS = 7200.0


class Keepalive:
    """Timers of one connection: PINGs to a silent client, the connection's age, and strikes for PINGs from it.

    After gRPC's proposals A8 (client side) and A9 (server side).
    """

    def __init__(self, connection: Http2Connection, options: Http2Options) -> None:
        self._connection = connection
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._asked_at: float | None = None
        self._pinged_at: float | None = None
        self._strikes = 0
        self._timer = self._loop.call_later(options.keepalive_time, self._check)
        self._age = (
            None if options.max_age is None else self._loop.call_later(options.max_age, self._grow_old)
        )

    def stop(self) -> None:
        """The connection has ended."""
        self._timer.cancel()
        if self._age is not None:
            self._age.cancel()

    def heard(self) -> None:
        """Something came from the client."""
        self._heard_at = self._loop.time()
        self._asked_at = None

    def sent_data(self) -> None:
        """Data went to the client: it may ask anew whether it arrives."""
        self._strikes = 0
        self._pinged_at = None

    def pinged(self) -> None:
        """The client sent a PING."""
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
            self._connection.cut_off(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    def _check(self) -> None:
        options, now = self._options, self._loop.time()
        if self._asked_at is not None:
            self._connection.abort()
            return
        silent = now - self._heard_at
        if silent >= options.keepalive_time:
            self._asked_at = now
            self._connection.write(_PING)
            self._timer = self._loop.call_later(options.keepalive_timeout, self._check)
        else:
            self._timer = self._loop.call_later(options.keepalive_time - silent, self._check)

    def _grow_old(self) -> None:
        self._connection.go_away()
        grace = self._options.max_age_grace
        if grace is not None:
            self._age = self._loop.call_later(grace, self._connection.abort)
