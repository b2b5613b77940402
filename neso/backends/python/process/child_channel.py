"""The model's end of the socket."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from io import FileIO

from neso.backends.python.process.arena import Arena
from neso.backends.python.process.exchange import Exchange
from neso.backends.python.process.messages import Initialize, Message, Release
from neso.backends.python.process.wire import Decoder, encode

_READ_BYTES = 1 << 18


class ChildChannel:
    """Sends from any thread, even from a finalizer; one thread iterates over what comes, until the server is gone."""

    exchange: Exchange

    def __init__(self, connection: socket.socket, from_server: int, to_server: int) -> None:
        self._socket = connection
        self._from_server, self._to_server = FileIO(from_server, "r+"), FileIO(to_server, "r+")
        self._decoder = Decoder()
        # Finalizers may send while their thread is sending: between two messages, as sending one is one call.
        self._lock = threading.RLock()
        self._waiting: list[bytes] = []
        self._process = os.getpid()

    def receive_first(self) -> Message | None:
        """The message that says what to be; None if the server has gone already."""
        message = next(iter(self), None)
        if isinstance(message, Initialize):
            arena = Arena(self._to_server, message.shm_default_size, message.shm_growth_size)
            self.exchange = Exchange(arena, self._from_server, self._release)
        return message

    def send(self, message: Message) -> None:
        """Raises `TypeError` for what cannot be sent. What comes after the server's end is dropped."""
        data = encode(message)
        if os.getpid() != self._process:
            return  # a copy of this process, which a model may have forked: it lets go of what it does not own
        # A socket that is closed is for the reader to notice, which ends this process.
        with self._lock, contextlib.suppress(OSError):
            if self._waiting:
                data = b"".join((*self._waiting, data))
                self._waiting.clear()
            self._socket.sendall(data)

    def send_later(self, message: Message) -> None:
        """Together with the next one, which must be soon: waking the server costs more than the message itself."""
        data = encode(message)
        with self._lock:
            self._waiting.append(data)

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return
            if not data:
                return
            for message in self._decoder.feed(data):
                if isinstance(message, Release):
                    for offset in message.offsets:
                        self.exchange.own.release(offset)
                else:
                    yield message

    def _release(self, offset: int) -> None:
        self.send(Release((offset,)))
