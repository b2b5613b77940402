"""Flow control in both directions: receive windows, write buffer, limits on costly actions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from neso.frontends.transport.http2.frames import ErrorCode, Http2ConnectionError
from neso.frontends.transport.tcp import WriteProgress

_LARGE = 64 << 10  # bytes; larger payloads are not copied to join them with other frames


class ReceiveWindow:
    """Bytes that a client may still send on a connection or stream. Credit is returned in large increments.

    `extend` admits a message that is larger than the window; the credit of its bytes is then not returned.
    """

    __slots__ = ("_available", "_consumed", "_extension", "_size")

    def __init__(self, size: int) -> None:
        self._size = self._available = size
        self._consumed = 0
        self._extension = 0

    def receive(self, size: int) -> bool:
        """Account for received bytes. Returns False if they exceed the window."""
        self._available -= size
        return self._available >= 0

    def consume(self, size: int) -> int:
        """Account for processed bytes. Returns the WINDOW_UPDATE increment to send now; 0: send no update."""
        if self._extension:
            extended = min(self._extension, size)
            self._extension -= extended
            size -= extended
        consumed = self._consumed + size
        if consumed * 2 < self._size:
            self._consumed = consumed
            return 0
        self._consumed = 0
        self._available += consumed
        return consumed

    def allows(self, size: int) -> bool:
        """Whether the client may send `size` bytes now."""
        return size <= self._available

    def extend(self, size: int) -> int:
        """Let the client send at least `size` bytes. Returns the WINDOW_UPDATE increment to send now, or 0."""
        missing = size - self._available
        if missing <= 0:
            return 0
        self._extension += missing
        self._available = size
        return missing


def _ignore() -> None: ...


class FrameWriter:
    """Writes frames to the transport. Frames written between `cork` and `uncork` are sent together.

    `on_stalled` is called if the client reads too little while the write buffer is full, see `WriteProgress`.
    """

    def __init__(self, transport: asyncio.Transport, timeout: float, on_stalled: Callable[[], None]) -> None:
        self._transport = transport
        self._timeout = timeout
        self._on_stalled = on_stalled
        self._loop = asyncio.get_running_loop()
        self._corked: list[bytes] | None = None
        self._corked_size = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._stall_timer: asyncio.TimerHandle | None = None
        self._progress = WriteProgress(timeout)
        self._closed = False
        self.writable = True

    def write(self, data: bytes) -> None:
        """Send frames."""
        corked = self._corked
        if corked is None:
            if not self._closed:
                if not self.writable:
                    self._progress.added(len(data))
                self._transport.write(data)
            return
        corked.append(data)
        self._corked_size += len(data)
        if self._corked_size >= _LARGE:
            self._flush(corked)

    def write_large(self, head: bytes, data: memoryview) -> None:
        """Send a frame. A large payload is not copied."""
        if len(data) < _LARGE:
            self.write(head + data)
            return
        if self._corked:
            self._flush(self._corked)
        if not self._closed:
            self._transport.writelines((head, data))

    def cork(self) -> None:
        """Hold back frames until `uncork`."""
        self._corked = []

    def uncork(self) -> None:
        """Send the held-back frames."""
        corked, self._corked = self._corked, None
        if corked and not self._closed:
            self._flush(corked)

    def close(self) -> None:
        """Send the held-back frames; later writes are dropped."""
        self.uncork()
        self._closed = True

    def release(self) -> None:
        """Drop the references to the connection after it is lost."""
        self.close()
        self._on_stalled = _ignore

    def pause(self) -> None:
        """Handle a full write buffer of the transport."""
        self.writable = False
        self._writable.clear()
        if self._stall_timer is None:
            self._start_stall_timer()

    def resume(self) -> None:
        """Resume writing: the transport's write buffer has room again."""
        self.writable = True
        self.wake_waiters()

    @property
    def unsent(self) -> int:
        """Bytes in the transport's write buffer."""
        return self._transport.get_write_buffer_size()

    async def wait_writable(self) -> None:
        """Wait until the write buffer has room or the connection ends."""
        if not self.writable:
            await self._writable.wait()

    def wake_waiters(self) -> None:
        """Wake `wait_writable` and stop the stall timer: there is room, or the connection is lost."""
        self._writable.set()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _start_stall_timer(self) -> None:
        self._progress.start(self._loop.time(), self.unsent)
        self._stall_timer = self._loop.call_later(1.01 * self._timeout, self._check_progress)

    def _check_progress(self) -> None:
        if self._progress.stalled(self._loop.time(), self.unsent):
            self._stall_timer = None
            self._on_stalled()
        else:
            self._stall_timer = self._loop.call_later(1.01 * self._timeout, self._check_progress)

    def _flush(self, corked: list[bytes]) -> None:
        data = corked[0] if len(corked) == 1 else b"".join(corked)
        corked.clear()
        self._corked_size = 0
        if not self.writable:
            self._progress.added(len(data))
        self._transport.write(data)


class TokenBucket:
    """Limits client actions that cost the server more than the client: `burst` at once, then `rate` per second.

    An action costs one token or more. `add` returns tokens for useful actions.

    `name`: plural name of the action for the error message.
    """

    __slots__ = ("_burst", "_name", "_rate", "_tokens", "_updated_at")

    def __init__(self, name: str, burst: int, rate: float) -> None:
        self._name = name
        self._burst = self._tokens = float(burst)
        self._rate = rate
        self._updated_at = time.monotonic()

    def consume(self, tokens: float = 1.0) -> None:
        """Take tokens. Raises `Http2ConnectionError` if the bucket is empty."""
        self._tokens -= tokens
        if self._tokens >= 0:
            return
        now = time.monotonic()
        self._tokens = min(self._tokens + (now - self._updated_at) * self._rate, self._burst)
        self._updated_at = now
        if self._tokens < 0:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"too many {self._name}")

    def add(self, tokens: int) -> None:
        """Return tokens."""
        self._tokens = min(self._tokens + tokens, self._burst)
