"""A service with a method of each kind. Messages are bytes that select the behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from neso.frontends.transport.grpc import CallbackCall, CallbackHandler

LARGE = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Methods:
    """`log`: events of waiting handlers."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.read = 0  # messages read by ReadSlowly
        self.written = 0
        self.gate = asyncio.Event()
        self.contexts: list[Any] = []

    async def echo(self, message: bytes, context: Any) -> bytes:
        self.contexts.append(context)
        return message

    def callback(self, message: bytes, call: CallbackCall) -> None:
        if message == b"raise":
            raise KeyError("lost")
        if message == b"fail":
            call.fail(grpc.StatusCode.NOT_FOUND, "no such thing")
        elif message == b"wait":
            self.log.append("waits")
            call.on_cancel = lambda: self.log.append("cancelled")
            self.contexts.append(call)
        elif message == b"later":
            asyncio.get_running_loop().call_later(0.02, call.reply, b"later")
        else:
            call.reply(message)
            call.reply(b"twice")  # dropped

    async def abort(self, message: bytes, context: Any) -> bytes:
        await context.abort(
            grpc.StatusCode.FAILED_PRECONDITION, message.decode(), (("why", "so"), ("raw-bin", b"\0\xff"))
        )

    async def bug(self, message: bytes, context: Any) -> bytes:
        raise KeyError("lost")

    async def wait(self, message: bytes, context: Any) -> bytes:
        self.log.append("waits")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise
        return message

    async def metadata(self, message: bytes, context: Any) -> bytes:
        return repr([pair for pair in context.invocation_metadata() if pair[0] != "user-agent"]).encode()

    async def about(self, message: bytes, context: Any) -> bytes:
        return f"{context.peer()} {context.time_remaining()}".encode()

    async def join(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([message async for message in messages])

    async def read_slowly(self, messages: AsyncIterator[bytes], context: Any) -> bytes:
        await self.gate.wait()
        async for _ in messages:
            self.read += 1
        return b"%d" % self.read

    async def split(self, message: bytes, context: Any) -> AsyncIterator[bytes]:
        count, _, text = message.partition(b" ")
        for _ in range(int(count)):
            yield text

    async def endless(self, message: bytes, context: Any) -> None:
        self.log.append("waits")
        try:
            while True:
                await context.write(bytes(100_000))
                self.written += 1
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def chat(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async for message in messages:
                if message == b"fail":
                    await context.abort(grpc.StatusCode.OUT_OF_RANGE, "as you wish")
                yield message
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    def handlers(self) -> dict[str, Any]:
        def refuse(message: bytes) -> bytes:
            raise ValueError("no")

        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return {
            "Echo": unary(self.echo),
            "Callback": CallbackHandler(self.callback),
            "Abort": unary(self.abort),
            "Bug": unary(self.bug),
            "Wait": unary(self.wait),
            "Metadata": unary(self.metadata),
            "About": unary(self.about),
            "Unreadable": unary(self.echo, refuse),
            "Unwritable": unary(self.echo, None, refuse),
            "Join": grpc.stream_unary_rpc_method_handler(self.join),
            "ReadSlowly": grpc.stream_unary_rpc_method_handler(self.read_slowly),
            "Split": stream(self.split),
            "Endless": stream(self.endless),
            "Chat": grpc.stream_stream_rpc_method_handler(self.chat),
        }
