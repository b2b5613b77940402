"""How often a client may do what costs the server more than the client."""

from __future__ import annotations

import time

from neso.frontends.http2.frames import ConnectionFault, ErrorCode


class Budget:
    """A token bucket: `burst` at once, `rate` a second after that."""

    __slots__ = ("_burst", "_left", "_rate", "_spent_at", "_what")

    def __init__(self, what: str, burst: int, rate: float) -> None:
        self._what = what
        self._burst = self._left = float(burst)
        self._rate = rate
        self._spent_at = time.monotonic()

    def spend(self) -> None:
        """Raises `ConnectionFault` when nothing is left."""
        self._left -= 1
        if self._left >= 0:
            return
        now = time.monotonic()
        self._left = min(self._left + (now - self._spent_at) * self._rate, self._burst)
        self._spent_at = now
        if self._left < 0:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._what}")
