"""ModelStreamInfer."""

from __future__ import annotations

import asyncio
import queue
from collections import defaultdict

import grpc
import grpc.aio
import numpy as np
import pytest
from eventually import until
from kserve_backends import Wait
from kserve_grpc_backends import Repeat
from kserve_grpc_requests import one_input, repeat_request, waiting_request
from tritonclient.grpc import InferenceServerClient, InferInput, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

STATUS_ERRORS = (("triton_grpc_error", "true"),)


def identity_request(request_id: str, **parameters: str) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(
        model_name="identity", id=request_id, inputs=[one_input()], raw_input_contents=[bytes(8)]
    )
    for key, value in parameters.items():
        message.parameters[key].string_param = value
    return message


def is_final(message: service_pb2.ModelStreamInferResponse) -> bool:
    parameter = message.infer_response.parameters["triton_final_response"]
    assert parameter.WhichOneof("parameter_choice") == "bool_param"
    return parameter.bool_param


def index(message: service_pb2.ModelStreamInferResponse) -> int:
    assert not message.error_message
    return int.from_bytes(message.infer_response.raw_output_contents[0], "little")


async def send(call: grpc.aio.StreamStreamCall, *messages: service_pb2.ModelInferRequest) -> None:
    for message in messages:
        await call.write(message)


async def read(call: grpc.aio.StreamStreamCall) -> service_pb2.ModelStreamInferResponse:
    message = await asyncio.wait_for(call.read(), 60)
    assert message is not grpc.aio.EOF
    return message


async def test_decoupled_responses_are_in_order(stub):
    call = stub.ModelStreamInfer()
    await send(call, repeat_request("a", 3))
    await call.done_writing()
    messages = [message async for message in call]
    assert [index(message) for message in messages] == [0, 1, 2]
    assert [is_final(message) for message in messages] == [False] * 3
    assert {message.infer_response.id for message in messages} == {"a"}
    assert {message.infer_response.model_version for message in messages} == {"1"}
    assert await call.code() is grpc.StatusCode.OK


async def test_empty_final_response_on_request(stub):
    call = stub.ModelStreamInfer()
    await send(call, repeat_request("a", 2, empty_final=True))
    await call.done_writing()
    *full, last = [message async for message in call]
    assert [index(message) for message in full] == [0, 1]
    assert is_final(last)
    response = last.infer_response
    assert (response.model_name, response.model_version, response.id) == ("repeat", "1", "a")
    assert not response.outputs
    assert list(response.parameters) == ["triton_final_response"]


async def test_last_response_has_the_final_flag(stub):
    call = stub.ModelStreamInfer()
    await send(call, repeat_request("a", 2, flag_last=1))
    await call.done_writing()
    assert [is_final(message) async for message in call] == [False, True]


async def test_request_without_responses(stub):
    call = stub.ModelStreamInfer()
    await send(call, repeat_request("a", 0))
    await call.done_writing()
    assert [message async for message in call] == []
    assert await call.code() is grpc.StatusCode.OK


async def test_non_decoupled_models_send_one_response(stub):
    call = stub.ModelStreamInfer()
    await send(call, identity_request("a"), identity_request("b"))
    await call.done_writing()
    messages = [message async for message in call]
    assert [message.infer_response.id for message in messages] == ["a", "b"]
    assert all(is_final(message) for message in messages)
    assert messages[0].infer_response.raw_output_contents == [bytes(8)]


async def test_requests_while_responses_are_sent(stub):
    call = stub.ModelStreamInfer()
    await send(call, repeat_request("slow", 1000, delay=0.01))
    await read(call)
    await send(call, identity_request("quick"))
    while (await read(call)).infer_response.id != "quick":
        pass
    call.cancel()


async def test_twenty_interleaved_requests(stub):
    call = stub.ModelStreamInfer()
    count = 10
    for i in range(20):
        await send(call, repeat_request(str(i), count, empty_final=True, delay=0.002))
    await call.done_writing()
    by_id, order = defaultdict(list), []
    async for message in call:
        by_id[message.infer_response.id].append(message)
        order.append(message.infer_response.id)
    assert by_id.keys() == {str(i) for i in range(20)}
    for messages in by_id.values():
        assert [index(message) for message in messages[:-1]] == list(range(count))
        assert [is_final(message) for message in messages] == [False] * count + [True]
    assert len(set(order[:40])) > 10  # interleaved


async def test_error_leaves_the_stream_open(stub):
    call = stub.ModelStreamInfer()
    unknown = service_pb2.ModelInferRequest(model_name="nobody", id="u")
    malformed = service_pb2.ModelInferRequest(model_name="identity", id="m", inputs=[one_input()])
    await send(
        call, unknown, malformed, identity_request("f", fail="broken"), identity_request("r", **{"raise": ""})
    )
    await send(call, repeat_request("d", 3, fail_at=1))
    await call.done_writing()
    errors, indices = {}, []
    async for message in call:
        if message.error_message:
            assert is_final(message)
            errors[message.infer_response.id] = message.error_message
        else:
            indices.append(index(message))
    assert "'nobody' is not found" in errors.pop("u")
    assert "elements 0 in fp32_contents for input 'IN_FP32'" in errors.pop("m")
    assert errors.pop("f") == "broken"
    assert "a bug" in errors.pop("r")
    assert errors.pop("d") == "broke at 1"
    assert not errors
    assert indices == [0]
    assert await call.code() is grpc.StatusCode.OK


async def test_malformed_message_leaves_the_stream_open(server):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )()
        await call.write(b"\xff")
        assert "malformed" in (await read(call)).error_message
        await call.write(identity_request("a").SerializeToString())
        assert (await read(call)).infer_response.id == "a"
        call.cancel()


async def test_status_errors_header(stub):
    call = stub.ModelStreamInfer(metadata=STATUS_ERRORS)
    await send(
        call, repeat_request("other", 100_000, delay=0.01), repeat_request("d", 3, fail_at=1, delay=0.05)
    )
    with pytest.raises(grpc.aio.AioRpcError, match="broke at 1") as caught:
        async for message in call:
            assert not message.error_message
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    await until(lambda: Repeat.cancelled == ["other"])


async def test_status_errors_header_with_a_rejected_request(stub):
    call = stub.ModelStreamInfer(metadata=STATUS_ERRORS)
    await send(call, service_pb2.ModelInferRequest(model_name="nobody", id="u"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_error_while_a_response_is_written(stub, caplog):
    """The status must wait for the message that is being written."""
    call = stub.ModelStreamInfer(metadata=STATUS_ERRORS)
    count = 900_000
    large = service_pb2.ModelInferRequest(
        model_name="identity", inputs=[one_input(shape=(count,))], raw_input_contents=[bytes(4 * count)]
    )
    await send(call, large, large)
    await asyncio.sleep(0.3)  # the responses exceed the flow-control window
    await send(call, service_pb2.ModelInferRequest(model_name="nobody", id="u"))
    await asyncio.sleep(0.1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await read(call)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert not caplog.records


async def test_cancel_cancels_every_request(stub):
    call = stub.ModelStreamInfer()
    await send(call, waiting_request("w"), *(repeat_request(str(i), 100_000, delay=0.01) for i in range(5)))
    await read(call)
    await until(lambda: Wait.waiting)
    call.cancel()
    await until(lambda: Wait.cancelled == ["w"] and sorted(Repeat.cancelled) == list("01234"))


async def test_cancel_after_half_close(stub):
    call = stub.ModelStreamInfer()
    await send(call, waiting_request("w"))
    await call.done_writing()
    await until(lambda: Wait.waiting)
    call.cancel()
    await until(lambda: Wait.cancelled == ["w"])


async def test_disconnect_cancels_every_request(server):
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
    call = channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        service_pb2.ModelInferRequest.SerializeToString,
        service_pb2.ModelStreamInferResponse.FromString,
    )()
    await send(call, waiting_request("w"))
    await until(lambda: Wait.waiting)
    await channel.close()
    await until(lambda: Wait.cancelled == ["w"])


async def test_disconnects_leak_nothing(server, core, caplog):
    async def client(i: int) -> None:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{server.port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await send(call, *(repeat_request("", 1_000_000) for _ in range(3)))
            for _ in range(i * 5):
                await read(call)

    await asyncio.gather(*(client(i) for i in range(1, 9)))
    await until(lambda: core.model("repeat").in_flight_count == 0)
    assert len(Repeat.cancelled) >= 8
    assert not caplog.records


async def test_stop_waits_for_requests_and_ends_idle_streams(server, stub):
    idle, busy = stub.ModelStreamInfer(), stub.ModelStreamInfer()
    await send(idle, identity_request("i"))
    await send(busy, repeat_request("b", 5, delay=0.05))
    await read(idle)
    await read(busy)
    stopping = asyncio.create_task(server.stop(grace=60))
    assert [index(await read(busy)) for _ in range(4)] == [1, 2, 3, 4]
    for call in (idle, busy):
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
            await read(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.wait_for(stopping, 60)


async def test_stop_aborts_streams_after_the_grace_period(server, stub):
    call = stub.ModelStreamInfer()
    await send(call, waiting_request("w"), repeat_request("r", 100_000, delay=0.01))
    await read(call)
    await asyncio.wait_for(server.stop(grace=0.1), 60)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await read(call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert Wait.cancelled == ["w"]
    assert Repeat.cancelled == ["r"]


async def test_stop_with_a_stalled_client(server, stub):
    call = stub.ModelStreamInfer()
    large = service_pb2.ModelInferRequest(
        model_name="identity", inputs=[one_input("UINT8", (1 << 20,))], raw_input_contents=[bytes(1 << 20)]
    )
    writing = asyncio.create_task(send(call, *[large] * 20))
    await asyncio.sleep(0.3)
    await asyncio.wait_for(server.stop(grace=0.1), 60)
    call.cancel()
    await asyncio.gather(writing, return_exceptions=True)


async def test_tritonclient_stream(server):
    """Like Triton's examples."""
    answers: queue.Queue = queue.Queue()
    count = InferInput("COUNT", [1], "INT32")
    count.set_data_from_numpy(np.array([3], np.int32))

    def converse() -> list[int]:
        with InferenceServerClient(f"127.0.0.1:{server.port}") as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer("repeat", [count], request_id="1", enable_empty_final_response=True)
            seen = []
            while True:
                result, error = answers.get(timeout=60)
                assert error is None
                if result.get_response().parameters["triton_final_response"].bool_param:
                    break
                seen.append(int(result.as_numpy("INDEX")[0]))
            client.async_stream_infer("nobody", [count])
            result, error = answers.get(timeout=60)
            assert isinstance(error, InferenceServerException)
            client.async_stream_infer("repeat", [count], request_id="2", parameters={"delay": 10.0})
            client.stop_stream(cancel_requests=True)
            return seen

    assert await asyncio.to_thread(converse) == [0, 1, 2]


async def test_async_tritonclient_stream(client):
    count = InferInput("COUNT", [1], "INT32")
    count.set_data_from_numpy(np.array([2], np.int32))

    async def requests():
        for i in range(3):
            yield {"model_name": "repeat", "inputs": [count], "request_id": str(i)}

    seen = []
    async for result, error in client.stream_infer(requests()):
        assert error is None
        seen.append((result.get_response().id, int(result.as_numpy("INDEX")[0])))
    assert sorted(seen) == [(str(i), j) for i in range(3) for j in range(2)]
