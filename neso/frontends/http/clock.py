"""The time as an HTTP server needs it: coarse, and free to read."""

from __future__ import annotations

import time
from email.utils import formatdate


class Clock:
    """`now` is monotonic seconds, `date` the text of a Date header; both as of the last tick."""

    __slots__ = ("_second", "date", "now")

    def __init__(self) -> None:
        self._second = 0
        self.tick()

    def tick(self) -> None:
        self.now = time.monotonic()
        second = int(time.time())
        if second != self._second:
            self._second = second
            self.date = formatdate(second, usegmt=True)
