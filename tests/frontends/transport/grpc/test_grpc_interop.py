"""The interoperability cases of gRPC (doc/interop-test-descriptions.md) with the client of grpcio.

The service has the methods of `grpc.testing.TestService`. A request is JSON, with the sizes of the responses and a
status to return, and a payload after a zero byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from eventually import until

SERVICE = "grpc.testing.TestService"
INITIAL, TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP 😈\t\n"


def message(payload: int = 0, *sizes: int, status: tuple[int, str] | None = None) -> bytes:
    return json.dumps({"sizes": sizes, "status": status}).encode() + b"\0" + bytes(payload)


class TestService:
    __test__ = False

    def __init__(self) -> None:
        self.cancelled = 0

    async def empty_call(self, request: bytes, context: Any) -> bytes:
        return b""

    async def unary_call(self, request: bytes, context: Any) -> bytes:
        fields = await self._fields(request, context)
        return bytes(fields["sizes"][0]) if fields["sizes"] else b""

    async def streaming_input_call(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        try:
            return b"%d" % sum([len(each.partition(b"\0")[2]) async for each in requests])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def streaming_output_call(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for size in (await self._fields(request, context))["sizes"]:
            yield bytes(size)

    async def full_duplex_call(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            async for request in requests:
                for size in (await self._fields(request, context))["sizes"]:
                    yield bytes(size)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _fields(self, request: bytes, context: Any) -> dict[str, Any]:
        fields: dict[str, Any] = json.loads(request.partition(b"\0")[0])
        if fields["status"] is not None:
            code, details = fields["status"]
            status = next(each for each in grpc.StatusCode if each.value[0] == code)
            sent = dict(context.invocation_metadata())
            metadata = tuple((name, sent[name]) for name in (TRAILING,) if name in sent)
            await context.abort(status, details, metadata)
        return fields

    def handlers(self) -> dict[str, Any]:
        return {
            "EmptyCall": grpc.unary_unary_rpc_method_handler(self.empty_call),
            "UnaryCall": grpc.unary_unary_rpc_method_handler(self.unary_call),
            "StreamingInputCall": grpc.stream_unary_rpc_method_handler(self.streaming_input_call),
            "StreamingOutputCall": grpc.unary_stream_rpc_method_handler(self.streaming_output_call),
            "FullDuplexCall": grpc.stream_stream_rpc_method_handler(self.full_duplex_call),
        }


class Stub:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        path = f"/{SERVICE}/"
        self.empty_call = channel.unary_unary(path + "EmptyCall")
        self.unary_call = channel.unary_unary(path + "UnaryCall")
        self.streaming_input_call = channel.stream_unary(path + "StreamingInputCall")
        self.streaming_output_call = channel.unary_stream(path + "StreamingOutputCall")
        self.full_duplex_call = channel.stream_stream(path + "FullDuplexCall")
        self.unimplemented_method = channel.unary_unary(path + "UnimplementedCall")
        self.unimplemented_service = channel.unary_unary(
            "/grpc.testing.UnimplementedService/UnimplementedCall"
        )


@pytest.fixture
def service() -> TestService:
    return TestService()


@pytest.fixture
async def stub(serve, connect, service: TestService) -> Stub:
    server = await serve(compress_level=1)
    server.add_registered_method_handlers(SERVICE, service.handlers())
    return Stub(connect(server))


async def error_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


async def test_empty_unary(stub):
    assert await stub.empty_call(b"") == b""


@pytest.mark.parametrize("compression", list(grpc.Compression))
async def test_large_unary(stub, compression):
    reply = await stub.unary_call(message(271_828, 314_159), compression=compression)
    assert reply == bytes(314_159)


@pytest.mark.parametrize("compression", list(grpc.Compression))
async def test_client_streaming(stub, compression):
    requests = [message(size) for size in (27182, 8, 1828, 45904)]
    assert await stub.streaming_input_call(iter(requests), compression=compression) == b"74922"


@pytest.mark.parametrize("compression", list(grpc.Compression))
async def test_server_streaming(stub, compression):
    sizes = [31415, 9, 2653, 58979]
    call = stub.streaming_output_call(message(0, *sizes), compression=compression)
    assert [len(reply) async for reply in call] == sizes


async def test_ping_pong(stub):
    call = stub.full_duplex_call()
    for sent, expected in ((27182, 31415), (8, 9), (1828, 2653), (45904, 58979)):
        await call.write(message(sent, expected))
        assert len(await call.read()) == expected
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_empty_stream(stub):
    call = stub.full_duplex_call()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK


async def test_custom_metadata(stub):
    """The initial metadata of this server is that of the protocol; a handler sets trailing metadata with the status."""
    metadata = ((INITIAL, "test_initial_metadata_value"), (TRAILING, b"\xab\xab\xab"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.unary_call(message(271_828, status=(10, "aborted")), metadata=metadata)
    assert dict(caught.value.trailing_metadata()) == {TRAILING: b"\xab\xab\xab"}
    call = stub.full_duplex_call(metadata=metadata)
    await call.write(message(271_828, 314_159))
    assert len(await call.read()) == 314_159
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK


async def test_status_code_and_message(stub):
    request = message(0, status=(2, "test status message"))
    expected = (grpc.StatusCode.UNKNOWN, "test status message")
    assert await error_of(stub.unary_call(request)) == expected
    call = stub.full_duplex_call()
    await call.write(request)
    await call.done_writing()
    assert await error_of(call.read()) == expected


async def test_special_status_message(stub):
    request = message(0, status=(2, SPECIAL))
    assert await error_of(stub.unary_call(request)) == (grpc.StatusCode.UNKNOWN, SPECIAL)


async def test_unimplemented_method(stub):
    assert (await error_of(stub.unimplemented_method(b"")))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_unimplemented_service(stub):
    assert (await error_of(stub.unimplemented_service(b"")))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_cancel_after_begin(stub, service):
    call = stub.streaming_input_call()
    await call.write(message(100))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await call.code() is grpc.StatusCode.CANCELLED
    await until(lambda: service.cancelled == 1)


async def test_cancel_after_first_response(stub, service):
    call = stub.full_duplex_call()
    await call.write(message(27182, 31415))
    assert len(await call.read()) == 31415
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED
    await until(lambda: service.cancelled == 1)


async def test_timeout_on_sleeping_server(stub):
    call = stub.full_duplex_call(timeout=0.2)
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(message(27182))  # the deadline can pass before
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_concurrent_large_unary(stub):
    replies = await asyncio.gather(*(stub.unary_call(message(271_828, 314_159)) for _ in range(50)))
    assert {len(reply) for reply in replies} == {314_159}


async def test_rpc_soak(stub):
    for _ in range(100):
        assert len(await stub.unary_call(message(27_182, 31_415))) == 31_415
