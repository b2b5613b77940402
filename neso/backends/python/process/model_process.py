"""The server's end of the socket to the process of a model, and the watch over that process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import threading
from collections import deque
from collections.abc import Callable

from neso.backends.python.description import PythonSettings
from neso.backends.python.process.codec import Decoder, Exchange, encode
from neso.backends.python.process.messages import Message, Release
from neso.backends.python.process.shared_memory import Arena
from neso.backends.python.process.spawn import Interpreter, Spawned, how_it_ended

logger = logging.getLogger(__name__)

_COPY_IN_LOOP = 1 << 20
"""Bytes; a larger copy into shared memory goes on in a thread, so that the loop is not held up for long."""

_LAST_WORDS = 0.5
"""Seconds to wait for the end of the socket once the process has ended: others may have inherited it."""

Build = Callable[[], Message]


class ModelProcess(asyncio.Protocol):
    """One process, from its start to its end; belongs to the core's event loop.

    `received` gets each message. `ended` is resolved, with the reason, when the process is gone and all that it has
    said was received. Messages leave in the order of `send`.
    """

    exchange: Exchange

    def __init__(self, received: Callable[[Message], None]) -> None:
        self._received = received
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._decoder = Decoder()
        self._outbox: deque[tuple[Build, int, Callable[[Exception], None]]] = deque()
        self._copying: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._disconnected = False
        self._code: int | None = None
        self._released: deque[int] = deque()
        self._release_planned = threading.Lock()

    async def start(self, interpreter: Interpreter, settings: PythonSettings) -> None:
        """Raises `OSError` if the interpreter cannot be started."""
        self._spawned = Spawned(interpreter, settings.shm_name)
        spawned = self._spawned
        arena = Arena(spawned.from_server, settings.shm_default_size, settings.shm_growth_size)
        self.exchange = Exchange(arena, spawned.to_server, self._release)
        self._watch = os.pidfd_open(spawned.process.pid)
        self._loop.add_reader(self._watch, self._process_ended)
        try:
            self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=spawned.socket)
        except BaseException:
            self._loop.remove_reader(self._watch)
            os.close(self._watch)
            spawned.process.kill()
            spawned.process.wait()
            spawned.close()
            raise

    @property
    def pid(self) -> int:
        return self._spawned.process.pid

    def send(self, message: Message) -> None:
        """Queue a message without tensors. Dropped once the process has ended."""
        self.send_tensors(lambda: message, 0, lambda error: None)

    def send_tensors(self, build: Build, size: int, failed: Callable[[Exception], None]) -> None:
        """Queue a message whose making copies `size` bytes into shared memory; in a thread if that is much.

        `failed` is told, on the loop, when it cannot be made.
        """
        if self._transport.is_closing():
            return
        if self._copying is None and size <= _COPY_IN_LOOP:
            try:
                self._transport.write(_make(build))
            except Exception as error:
                failed(error)
            return
        self._outbox.append((build, size, failed))
        if self._copying is None:
            self._copying = self._loop.create_task(self._copy())

    def kill_after(self, seconds: float) -> None:
        """End it by force, if it has not ended by itself then."""
        self._timers.append(self._loop.call_later(seconds, self.kill))

    def kill(self) -> None:
        """End it by force; `ended` is resolved soon."""
        if self._spawned.process.returncode is None:
            self._spawned.process.kill()

    async def _copy(self) -> None:
        try:
            while self._outbox:
                build, size, failed = self._outbox.popleft()
                try:
                    data = await asyncio.to_thread(_make, build) if size > _COPY_IN_LOOP else _make(build)
                except Exception as error:
                    failed(error)
                else:
                    if not self._transport.is_closing():
                        self._transport.write(data)
                del build, failed  # the tensors that they hold
        finally:
            self._copying = None

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                if isinstance(message, Release):
                    for offset in message.offsets:
                        self.exchange.own.release(offset)
                else:
                    self._received(message)
        except (pickle.UnpicklingError, EOFError, TypeError, ValueError):
            logger.exception("process %d of a model does not keep to the protocol, and is killed", self.pid)
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        # A process without its socket is of no use any more; mostly it has ended by itself.
        self.kill_after(_LAST_WORDS)
        self._disconnected = True
        self._finish()

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._watch)
        os.close(self._watch)
        self._code = self._spawned.process.wait()
        if not self._disconnected:
            self._timers.append(self._loop.call_later(_LAST_WORDS, self._transport.abort))
        self._finish()

    def _finish(self) -> None:
        if self._code is None or not self._disconnected or self.ended.done():
            return
        for timer in self._timers:
            timer.cancel()  # it would keep the memory until then
        self.exchange.own.close()
        self._spawned.close()
        self._outbox.clear()
        self.ended.set_result(how_it_ended(self._code))

    def _release(self, offset: int) -> None:
        """From any thread, even in a finalizer."""
        self._released.append(offset)
        if self._release_planned.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # the server has ended
                self._loop.call_soon_threadsafe(self._send_released)

    def _send_released(self) -> None:
        self._release_planned.release()
        offsets = []
        while self._released:
            offsets.append(self._released.popleft())
        if offsets:
            self.send(Release(tuple(offsets)))


def _make(build: Build) -> bytes:
    return encode(build())
