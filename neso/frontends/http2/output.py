"""What is on its way to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LARGE = 64 << 10  # bytes; what is larger is not copied to be joined with something else


class Output:
    """The transport's writing side. Frames written between `hold` and `release` leave together.

    `on_stalled` is called when the client has taken nothing for `timeout` seconds though its buffer is full.
    """

    def __init__(self, transport: asyncio.Transport, timeout: float, on_stalled: Callable[[], None]) -> None:
        self._transport = transport
        self._timeout = timeout
        self._on_stalled = on_stalled
        self._loop = asyncio.get_running_loop()
        self._held: list[bytes] | None = None
        self._held_size = 0
        self._room = asyncio.Event()
        self._room.set()
        self._watch: asyncio.TimerHandle | None = None
        self._watched = 0
        self._closed = False
        self.writable = True

    def write(self, data: bytes) -> None:
        """Send frames."""
        held = self._held
        if held is None:
            if not self._closed:
                self._transport.write(data)
            return
        held.append(data)
        self._held_size += len(data)
        if self._held_size >= _LARGE:
            self._flush(held)

    def write_large(self, head: bytes, data: memoryview) -> None:
        """Send a frame whose payload is not worth a copy."""
        if len(data) < _LARGE:
            self.write(head + data)
            return
        if self._held:
            self._flush(self._held)
        if not self._closed:
            self._transport.writelines((head, data))

    def hold(self) -> None:
        """Keep what is written from now on."""
        self._held = []

    def release(self) -> None:
        """Send what was kept."""
        held, self._held = self._held, None
        if held and not self._closed:
            self._flush(held)

    def close(self) -> None:
        """Send what was kept; what is written after that is dropped."""
        self.release()
        self._closed = True

    def pause(self) -> None:
        """The buffer is full."""
        self.writable = False
        self._room.clear()
        if self._watch is None:
            self._watch_on()

    def resume(self) -> None:
        """The buffer has room again."""
        self.writable = True
        self.end()

    @property
    def unsent(self) -> int:
        """Bytes that the client's side has not taken."""
        return self._transport.get_write_buffer_size()

    async def room(self) -> None:
        """Wait until the buffer has room."""
        if not self.writable:
            await self._room.wait()

    def end(self) -> None:
        """The connection has gone: nobody waits any more."""
        self._room.set()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _watch_on(self) -> None:
        self._watched = self.unsent
        self._watch = self._loop.call_later(self._timeout, self._check)

    def _check(self) -> None:
        if self.unsent >= self._watched:
            self._watch = None
            self._on_stalled()
        else:
            self._watch_on()

    def _flush(self, held: list[bytes]) -> None:
        data = held[0] if len(held) == 1 else b"".join(held)
        held.clear()
        self._held_size = 0
        self._transport.write(data)
