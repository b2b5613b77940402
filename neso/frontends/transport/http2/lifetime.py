"""Lifetime of a connection: handshake timeout, keepalive, maximum age and graceful shutdown."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from neso.frontends.transport.http2.flow_control import FrameWriter
from neso.frontends.transport.http2.frames import (
    MAX_WINDOW,
    ErrorCode,
    Http2ConnectionError,
    goaway_frame,
    ping_frame,
)
from neso.frontends.transport.http2.settings import Http2Options

if TYPE_CHECKING:
    from neso.frontends.transport.http2.connection import Http2Connection

_KEEPALIVE_PING = ping_frame(b"neso\0\0\0\0")
_MIN_PING_INTERVAL_WITHOUT_STREAMS = 7200.0  # seconds
_AGE_JITTER = 0.1
_GOAWAY_PING_PAYLOAD = b"shutdown"
_GOAWAY_PING_TIMEOUT = 1.0  # seconds


class Keepalive:
    """Timers of one connection: handshake, PINGs to a silent client, maximum age; and limits on the client's PINGs.

    Implements gRPC proposals A8 (client-side keepalive) and A9 (server-side connection management).
    """

    def __init__(self, connection: Http2Connection, options: Http2Options) -> None:
        self._connection = connection
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._last_received_at = self._loop.time()
        self._awaiting_ack = False
        self._last_ping_at: float | None = None
        self._strikes = 0
        self._timer = self._loop.call_later(options.handshake_timeout, connection.abort)
        self._age_timer: asyncio.TimerHandle | None = None
        if options.max_age is not None:
            age = options.max_age * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER)
            self._age_timer = self._loop.call_later(age, self._on_max_age)

    def stop(self) -> None:
        """Cancel the timers."""
        self._timer.cancel()
        if self._age_timer is not None:
            self._age_timer.cancel()

    def on_handshake(self) -> None:
        """Stop the handshake timeout and start keepalive checks."""
        self._timer.cancel()
        self._timer = self._loop.call_later(self._options.keepalive_time, self._check)

    def on_received(self) -> None:
        """Handle bytes received from the client."""
        self._last_received_at = self._loop.time()
        self._awaiting_ack = False

    def on_sent(self) -> None:
        """Reset the client's ping strikes after HEADERS, DATA or WINDOW_UPDATE were sent."""
        self._strikes = 0
        self._last_ping_at = None

    def on_ping(self) -> None:
        """Handle a PING. Raises `Http2ConnectionError` if the client sends too many."""
        options = self._options
        interval = options.min_ping_interval
        if not self._connection.streams and not options.pings_without_streams:
            interval = _MIN_PING_INTERVAL_WITHOUT_STREAMS
        now = self._loop.time()
        before, self._last_ping_at = self._last_ping_at, now
        if before is None or now - before >= interval:
            return
        self._strikes += 1
        if options.max_ping_strikes and self._strikes > options.max_ping_strikes:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")

    def _check(self) -> None:
        options = self._options
        silent = self._loop.time() - self._last_received_at
        if self._awaiting_ack:
            self._connection.abort()
        elif silent < options.keepalive_time:
            self._timer = self._loop.call_later(options.keepalive_time - silent, self._check)
        elif self._connection.streams or options.pings_without_streams:
            self._awaiting_ack = True
            self._connection.writer.write(_KEEPALIVE_PING)
            self._timer = self._loop.call_later(options.keepalive_timeout, self._check)
        else:
            self._timer = self._loop.call_later(options.keepalive_time, self._check)

    def _on_max_age(self) -> None:
        self._connection.go_away()
        grace = self._options.max_age_grace
        if grace is not None:
            self._age_timer = self._loop.call_later(grace, self._connection.abort)


class GracefulGoAway:
    """Graceful shutdown of a connection without losing requests in flight (RFC 9113, section 6.8).

    The first GOAWAY allows all stream ids and is followed by a PING. Requests that the client sent before its PING ACK
    are still accepted; then `on_final` sends the GOAWAY with the last stream id.
    """

    def __init__(self, writer: FrameWriter, on_final: Callable[[], None]) -> None:
        self._writer = writer
        self._on_final = on_final
        self._timer: asyncio.TimerHandle | None = None
        self._started = False

    def start(self) -> None:
        """Announce the shutdown to the client. Idempotent."""
        if self._started:
            return
        self._started = True
        self._writer.write(goaway_frame(MAX_WINDOW, ErrorCode.NO_ERROR) + ping_frame(_GOAWAY_PING_PAYLOAD))
        self._timer = asyncio.get_running_loop().call_later(_GOAWAY_PING_TIMEOUT, self._finish)

    def on_ping_ack(self, payload: bytes) -> None:
        """Handle a PING acknowledgment."""
        if payload == _GOAWAY_PING_PAYLOAD and self._timer is not None:
            self._finish()

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _finish(self) -> None:
        self.stop()
        self._on_final()
