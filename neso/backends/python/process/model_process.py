"""Server side of the channel to a model's process, and supervision of that process."""

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
from neso.backends.python.process.codec import Decoder, MessageCodec, encode
from neso.backends.python.process.messages import Message, Release
from neso.backends.python.process.shared_memory import Arena
from neso.backends.python.process.spawn import Interpreter, SpawnedProcess, describe_exit

logger = logging.getLogger(__name__)

_MAX_COPY_IN_LOOP = 1 << 20
"""In bytes. Larger copies into shared memory run in a thread, so that they do not block the event loop."""

_DISCONNECT_TIMEOUT = 0.5
"""Timeout for the socket to close after the process has ended, in seconds: its children may have inherited it."""

MessageFactory = Callable[[], Message]


class ModelProcess(asyncio.Protocol):
    """One child process. Used on the core's event loop only.

    `received` is called with each message. `ended` is resolved with the exit reason when the process has ended and all
    its messages were received. Messages are sent in the order of the calls of `send` and `send_tensors`.
    """

    codec: MessageCodec

    def __init__(self, received: Callable[[Message], None]) -> None:
        self._received = received
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = self._loop.create_future()
        self._decoder = Decoder()
        self._outbox: deque[tuple[MessageFactory, int, Callable[[Exception], None]]] = deque()
        self._copying: asyncio.Task[None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._disconnected = False
        self._exit_code: int | None = None
        self._released: deque[int] = deque()
        self._release_scheduled = threading.Lock()

    async def start(self, interpreter: Interpreter, settings: PythonSettings) -> None:
        """Spawn the process. Raises `OSError` if the interpreter cannot be started."""
        self._spawned = SpawnedProcess(interpreter, settings.shm_name)
        spawned = self._spawned
        arena = Arena(spawned.from_server, settings.shm_default_size, settings.shm_growth_size)
        self.codec = MessageCodec(arena, spawned.to_server, self._release)
        self._pidfd = os.pidfd_open(spawned.process.pid)
        self._loop.add_reader(self._pidfd, self._process_ended)
        try:
            self._transport, _ = await self._loop.create_unix_connection(lambda: self, sock=spawned.socket)
        except BaseException:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            spawned.process.kill()
            spawned.process.wait()
            spawned.close()
            raise

    @property
    def pid(self) -> int:
        return self._spawned.process.pid

    def send(self, message: Message) -> None:
        """Send a message without tensors. Dropped if the process has ended."""
        self.send_tensors(lambda: message, 0, lambda error: None)

    def send_tensors(self, build: MessageFactory, size: int, failed: Callable[[Exception], None]) -> None:
        """Send the message returned by `build`, which copies `size` bytes into shared memory.

        Large messages are built in a thread. If building fails, `failed` is called on the event loop.
        """
        if self._transport.is_closing():
            return
        if self._copying is None and size <= _MAX_COPY_IN_LOOP:
            try:
                self._transport.write(_encode_built(build))
            except Exception as error:
                failed(error)
            return
        self._outbox.append((build, size, failed))
        if self._copying is None:
            self._copying = self._loop.create_task(self._copy())

    def kill_after(self, seconds: float) -> None:
        """Kill the process if it does not end within `seconds`."""
        self._timers.append(self._loop.call_later(seconds, self.kill))

    def kill(self) -> None:
        """Kill the process. `ended` is resolved soon after."""
        if self._spawned.process.returncode is None:
            self._spawned.process.kill()

    async def _copy(self) -> None:
        try:
            while self._outbox:
                build, size, failed = self._outbox.popleft()
                try:
                    in_thread = size > _MAX_COPY_IN_LOOP
                    data = (
                        await asyncio.to_thread(_encode_built, build) if in_thread else _encode_built(build)
                    )
                except Exception as error:
                    failed(error)
                else:
                    if not self._transport.is_closing():
                        self._transport.write(data)
                del build, failed  # they reference tensors
        finally:
            self._copying = None

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._decoder.feed(data):
                if isinstance(message, Release):
                    for offset in message.offsets:
                        self.codec.own.release(offset)
                    self.codec.own.trim()
                else:
                    self._received(message)
        except (pickle.UnpicklingError, EOFError, TypeError, ValueError):
            logger.exception("model process %d sent an invalid message and is killed", self.pid)
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        # The process cannot be used without its socket. Usually it has already ended.
        self.kill_after(_DISCONNECT_TIMEOUT)
        self._disconnected = True
        self._finish()

    def _process_ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._exit_code = self._spawned.process.wait()
        if not self._disconnected:
            self._timers.append(self._loop.call_later(_DISCONNECT_TIMEOUT, self._transport.abort))
        self._finish()

    def _finish(self) -> None:
        if self._exit_code is None or not self._disconnected or self.ended.done():
            return
        for timer in self._timers:
            timer.cancel()  # a pending timer would keep this object alive
        self.codec.own.close()
        self._spawned.close()
        self._outbox.clear()
        self.ended.set_result(describe_exit(self._exit_code))

    def _release(self, offset: int) -> None:
        """Release a block. Called from any thread, also from finalizers."""
        self._released.append(offset)
        if self._release_scheduled.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._send_released)

    def _send_released(self) -> None:
        self._release_scheduled.release()
        offsets = []
        while self._released:
            offsets.append(self._released.popleft())
        if offsets:
            self.send(Release(tuple(offsets)))


def _encode_built(build: MessageFactory) -> bytes:
    return encode(build())
