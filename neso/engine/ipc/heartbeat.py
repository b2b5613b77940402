"""The pipe by which a client watches an engine process: heartbeats, then the reason of the end, if it is known."""

from __future__ import annotations

import contextlib
import os
import threading
import time

_BEAT = b"."
_REASON = b"!"


class Heartbeat:
    """A thread that regularly writes a byte to a pipe, as long as this process runs and its threads get the GIL.

    The client kills a process that is silent for `heartbeat_timeout` seconds. A thread, because the main thread writes
    nothing during a step, which may be long.
    """

    def __init__(self, fd: int, timeout: float) -> None:
        os.set_inheritable(fd, False)  # the client detects the end of this process by the end of the pipe
        os.set_blocking(fd, False)
        self._fd, self._interval = fd, heartbeat_interval(timeout)
        if timeout:
            threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(BlockingIOError):  # a stopped client does not read
                os.write(self._fd, _BEAT)
            time.sleep(self._interval)


def heartbeat_interval(timeout: float) -> float:
    """Return the seconds between two heartbeats."""
    return min(1.0, timeout / 8)


def end_report(reason: str) -> bytes:
    """Return what a process writes to the pipe before it ends for a reason that its exit status does not tell."""
    return _REASON + reason.encode()


class HeartbeatReader:
    """The client's end of the pipe: collects the reason, if one is written."""

    def __init__(self) -> None:
        self._reason = b""

    def feed(self, received: bytes) -> None:
        """Process bytes read from the pipe."""
        if self._reason:
            self._reason += received
        else:
            _, mark, reason = received.partition(_REASON)
            self._reason = mark + reason

    @property
    def reason(self) -> str:
        """The reason that the process has reported; "" if none."""
        return self._reason[len(_REASON) :].decode(errors="replace")
