"""Wakes a thread that waits in a poller."""

from __future__ import annotations

import contextlib
import os


class WakeUp:
    """A pipe that is readable after `set`, until `clear`. Can be registered with a poller; `set` is thread-safe."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def fileno(self) -> int:
        return self._reader

    def set(self) -> None:
        """Make the pipe readable."""
        with contextlib.suppress(BlockingIOError, OSError):  # it is readable already, or closed
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Consume all calls of `set`."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def close(self) -> None:
        """Close both ends; later calls of `set` do nothing."""
        reader, writer, self._reader, self._writer = self._reader, self._writer, -1, -1
        os.close(reader)
        os.close(writer)
