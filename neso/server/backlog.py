"""Bound on the responses that wait for a client that reads slowly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

DEFAULT_LIMIT = 1 << 20
"""Bytes of responses above which the producer of a request waits."""
OVERFLOW_FACTOR = 16
"""Multiple of the limit above which the request of a producer that cannot wait is cancelled."""
OVERFLOW_WAIT = 1.0
"""Seconds that the event loop of a model waits for a client before its request is cancelled."""
DEFAULT_CALL_LIMIT = 64 << 20
"""The same as `DEFAULT_LIMIT`, for a call by another model."""
CALL_OVERFLOW_SLACK = 16 << 20
"""Bytes above the limit that a call by another model may exceed at least: a process sends on until it hears of it."""
DEFAULT_CALL_TIMEOUT = 60.0
"""Seconds that a producer waits for a model that calls it and takes none of the responses."""
MAX_CALL_TIMEOUT = 1e6
"""Maximum of this option: event loops cannot wait for infinity."""


class Backlog:
    """Size of a request's responses that its consumer has not taken, in bytes. Thread-safe.

    While it is `full`, producers wait: coroutines in `wait`, threads in `wait_in_thread`. The request of a producer
    that cannot wait is cancelled when the backlog is `overflowing`. One response can be larger than either bound.
    """

    __slots__ = ("_closed", "_lock", "_size", "_waiting", "limit", "overflow_limit")

    def __init__(self, limit: int = DEFAULT_LIMIT, overflow_limit: int | None = None) -> None:
        self.limit = limit
        self.overflow_limit = overflow_limit or OVERFLOW_FACTOR * limit
        self._size = 0
        self._closed = False
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []

    @property
    def full(self) -> bool:
        return self._size >= self.limit and not self._closed

    @property
    def delays(self) -> bool:
        """Whether the backlog is full and a producer waits."""
        return self.full and bool(self._waiting)

    @property
    def overflowing(self) -> bool:
        return self.overflows(0)

    def overflows(self, last: int) -> bool:
        """Whether the backlog is overflowing without the last response, of `last` bytes."""
        return self._size - last >= self.overflow_limit and not self._closed

    def add(self, size: int) -> None:
        """Account for a response that waits for the consumer."""
        with self._lock:
            self._size += size

    def remove(self, size: int) -> None:
        """Account for a response that the consumer has taken."""
        with self._lock:
            self._size -= size
            if self._size >= self.limit or not self._waiting:
                return
        self._wake()

    def close(self) -> None:
        """Let all producers continue: the request has ended or is cancelled, its responses are dropped."""
        self._closed = True
        self._wake()

    def on_room(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the backlog is not full, in this thread or the consumer's."""
        with self._lock:
            if self.full:
                self._waiting.append(callback)
                return
        callback()

    async def wait(self) -> None:
        """Wait until the backlog is not full."""
        while self.full:
            room = asyncio.get_running_loop().create_future()
            self.on_room(lambda room=room: None if room.done() else room.set_result(None))  # type: ignore[misc]
            await room

    def wait_in_thread(self) -> None:
        """Wait until the backlog is not full. An event loop in this thread waits a bounded time, on overflow only."""
        if not self.full:
            return
        in_loop = is_in_event_loop()
        if in_loop and not self.overflowing:
            return
        while self.full:
            room = threading.Event()
            self.on_room(room.set)
            if not room.wait(OVERFLOW_WAIT if in_loop else None):
                return

    def _wake(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()


def is_in_event_loop() -> bool:
    """Whether this thread runs an event loop, which must not wait long."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
