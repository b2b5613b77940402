"""Broadcast of commands from rank 0 to the other ranks, over a stream socket each.

Not MPI_Bcast: a rank that waits in MPI polls, and an idle model would keep the cores of its other ranks busy.
"""

from __future__ import annotations

import hmac
import time

from neso.engine.parallel.control import Stream, close_listener, connect, listen

_MAX_TOKEN = 1024


class PlanSender:
    """Rank 0's side. The constructor listens at `address`; raises `OSError`."""

    def __init__(self, address: str) -> None:
        self._listener = listen(address)
        self._streams: list[Stream] = []

    @property
    def address(self) -> str:
        """Where the other ranks connect: a path, or ":PORT" of this host."""
        name = self._listener.getsockname()
        return name if isinstance(name, str) else f":{name[1]}"

    def accept(self, count: int, token: str, timeout: float) -> None:
        """Wait until `count` ranks have connected and sent `token`. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout
        while len(self._streams) < count:
            self._listener.settimeout(max(0.001, deadline - time.monotonic()))
            connected, _ = self._listener.accept()
            connected.settimeout(5.0)
            stream = Stream(connected)
            try:
                known = hmac.compare_digest(stream.receive(_MAX_TOKEN), token.encode())
            except OSError:
                known = False
            if known:
                connected.settimeout(None)
                self._streams.append(stream)
            else:
                stream.close()
        close_listener(self._listener)

    def send(self, message: bytes) -> None:
        """Send a message to all other ranks. Raises `OSError` if one has ended."""
        for stream in self._streams:
            stream.send(message)

    def close(self) -> None:
        close_listener(self._listener)
        for stream in self._streams:
            stream.close()


class PlanReceiver:
    """The side of another rank. The constructor connects; raises `OSError`."""

    def __init__(self, address: str, token: str, timeout: float) -> None:
        self._stream = Stream(connect(address, timeout))
        self._stream.send(token.encode())

    def receive(self) -> bytes:
        """Wait for the next message of rank 0. Raises `ConnectionClosed`, `OSError`."""
        return self._stream.receive()

    def close(self) -> None:
        self._stream.close()
