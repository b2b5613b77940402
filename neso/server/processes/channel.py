"""Duplex channel between the main process and a front-end process: a Unix socket pair with calls in both directions."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import pickle
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from neso.server.errors import InternalError, ServerError, Unavailable
from neso.server.processes.messages import (
    Call,
    EndCall,
    Flow,
    Infer,
    Item,
    Message,
    Response,
    Result,
    decoder,
    encoder,
    pack_error,
    unpack_error,
)

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_MAX_WAITING_ITEMS = 64
"""Items of a stream that wait for their consumer before the producer pauses."""

Operations = Mapping[str, Callable[..., Any]]
"""Functions, coroutine functions and functions that return asynchronous generators, by name."""


class Frames:
    """Splits a byte stream into messages, each with its length before it (4 bytes, little-endian)."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add a chunk and return the completed messages."""
        buffer = self._buffer
        buffer += data
        frames, start = [], 0
        while len(buffer) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            end = body + int.from_bytes(buffer[start:body], "little")
            if len(buffer) < end:
                break
            frames.append(bytes(memoryview(buffer)[body:end]))
            start = end
        if start:
            del buffer[:start]
        return frames


class Channel(asyncio.Protocol):
    """One end of the channel. Messages sent in one event-loop iteration are written together.

    - operations: called by the other process
    - on_message: called with messages that are not part of a call
    - on_lost: called when the other process has ended
    """

    def __init__(
        self,
        operations: Operations,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._operations = operations
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._pending: list[bytes] = []
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._streams: dict[int, _ItemQueue] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._gates: dict[int, asyncio.Event] = {}
        self.lost = False

    @classmethod
    async def open(
        cls,
        sock: socket.socket,
        operations: Operations,
        on_message: Callable[[Message], None],
        on_lost: Callable[[], None],
    ) -> Channel:
        """Use one end of a socket pair."""
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(
            lambda: cls(operations, on_message, on_lost), sock=sock
        )
        return channel

    def close(self) -> None:
        """Write what is pending and close."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def next_number(self) -> int:
        """Return a number for a call or a request."""
        return next(self._numbers)

    # -- messages -----------------------------------------------------------------------------------------------

    def send(self, encoded: bytes) -> None:
        """Send an encoded message; ignored when the other process has ended."""
        if self.lost:
            return
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(len(encoded).to_bytes(_LENGTH_BYTES, "little"))
        self._pending.append(encoded)

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(pending)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are no `asyncio.Transport`

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            message = decoder.decode(frame)
            try:
                if isinstance(message, Infer | Response):
                    self._on_message(message)
                else:
                    self._handle(message)
            except Exception:  # a defect must not end the connection of all other requests
                logger.exception("a message of another server process could not be handled")

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        gone = Unavailable("another process of the server has ended")
        for future in self._calls.values():
            if not future.done():
                future.set_exception(gone)
        for queue in self._streams.values():
            queue.put(gone)
        for task in self._serving.values():
            task.cancel()
        self._calls.clear()
        self._streams.clear()
        self._on_lost()

    def _handle(self, message: Message) -> None:
        match message:
            case Call():
                self._serve(message)
            case Result(number):
                self._end(message)
            case Item(number, value):
                if number in self._streams:
                    self._streams[number].put(pickle.loads(value))
            case Flow(number, paused) if number in self._gates:
                gate = self._gates[number]
                gate.clear() if paused else gate.set()
            case EndCall(number):
                if number in self._serving:
                    self._serving[number].cancel()
            case _:
                self._on_message(message)

    # -- calls of the other process -----------------------------------------------------------------------------

    async def call(self, operation: str, *arguments: Any) -> Any:
        """Call an operation of the other process. Raises its `ServerError`, `Unavailable` if the process has ended."""
        if self.lost:
            raise Unavailable("another process of the server has ended")
        number = next(self._numbers)
        future = self._calls[number] = self._loop.create_future()
        self._send_call(number, operation, arguments)
        try:
            return await future
        except asyncio.CancelledError:
            self.send(encoder.encode(EndCall(number)))
            raise
        finally:
            self._calls.pop(number, None)

    def notify(self, operation: str, *arguments: Any) -> None:
        """Call an operation without waiting for it."""
        self._send_call(0, operation, arguments)

    async def stream(self, operation: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Call a streaming operation and yield its items. Closing the generator cancels the call."""
        if self.lost:
            raise Unavailable("another process of the server has ended")
        number = next(self._numbers)
        queue = self._streams[number] = _ItemQueue(
            lambda paused: self.send(encoder.encode(Flow(number, paused)))
        )
        self._send_call(number, operation, arguments)
        ended = False
        try:
            while True:
                item = await queue.get()
                if isinstance(item, Exception):
                    ended = True
                    raise item
                if item is _END:
                    ended = True
                    return
                yield item
        finally:
            self._streams.pop(number, None)
            if not ended:
                self.send(encoder.encode(EndCall(number)))

    def _send_call(self, number: int, operation: str, arguments: tuple[Any, ...]) -> None:
        self.send(encoder.encode(Call(number, operation, pickle.dumps(arguments, pickle.HIGHEST_PROTOCOL))))

    def _end(self, message: Result) -> None:
        error = None if message.error is None else unpack_error(message.error)
        future = self._calls.get(message.number)
        if future is not None and not future.done():
            if error is None:
                future.set_result(pickle.loads(message.value))
            else:
                future.set_exception(error)
        elif message.number in self._streams:
            self._streams[message.number].put(_END if error is None else error)

    # -- calls by the other process -----------------------------------------------------------------------------

    def _serve(self, call: Call) -> None:
        task = self._loop.create_task(self._run(call))
        number = call.number or -next(self._numbers)
        self._serving[number] = task
        task.add_done_callback(lambda _: self._serving.pop(number, None))

    async def _run(self, call: Call) -> None:
        number = call.number
        try:
            value: Any = self._operations[call.operation](*pickle.loads(call.arguments))
            if isinstance(value, AsyncGenerator):
                await self._send_items(number, value)
                value = None
            elif inspect.isawaitable(value):
                value = await value
            result = Result(number, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        except ServerError as error:
            result = Result(number, error=pack_error(error))
        except Exception as error:
            logger.exception("a call of another server process failed: %s", call.operation)
            result = Result(number, error=pack_error(InternalError(f"{type(error).__name__}: {error}")))
        if number:
            self.send(encoder.encode(result))

    async def _send_items(self, number: int, items: AsyncGenerator[Any, None]) -> None:
        gate = self._gates[number] = asyncio.Event()
        gate.set()
        try:
            async with aclosing(items):
                async for item in items:
                    self.send(encoder.encode(Item(number, pickle.dumps(item, pickle.HIGHEST_PROTOCOL))))
                    await gate.wait()
        finally:
            del self._gates[number]


_END = object()


class _ItemQueue:
    """Items of a streaming call. `flow(paused)` is called when too many wait, and when there is room again."""

    def __init__(self, flow: Callable[[bool], None]) -> None:
        self._items: asyncio.Queue[Any] = asyncio.Queue()
        self._flow = flow
        self._paused = False

    def put(self, item: Any) -> None:
        self._items.put_nowait(item)
        if not self._paused and self._items.qsize() >= _MAX_WAITING_ITEMS:
            self._paused = True
            self._flow(True)

    async def get(self) -> Any:
        item = await self._items.get()
        if self._paused and self._items.qsize() <= _MAX_WAITING_ITEMS // 2:
            self._paused = False
            self._flow(False)
        return item
