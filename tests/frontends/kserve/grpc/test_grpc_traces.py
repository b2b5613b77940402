"""Trace activities of requests over gRPC."""

from __future__ import annotations

import grpc
import pytest
from kserve_grpc_requests import one_input, repeat_request
from trace_reader import check_order
from tritonclient.grpc import service_pb2

FRONTEND = {"GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"}


def identity(request_id: str, data: bytes) -> service_pb2.ModelInferRequest:
    return service_pb2.ModelInferRequest(
        model_name="identity", id=request_id, inputs=[one_input()], raw_input_contents=[data]
    )


async def test_infer(written, stub):
    await stub.ModelInfer(identity("a", bytes(8)))
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.ModelInfer(identity("b", bytes(7)))
    (trace,) = await written()
    assert (trace.model, trace.request_id) == ("identity", "a")
    assert {*FRONTEND, "INFER_RESPONSE_COMPLETE"} <= trace.timestamps.keys()
    check_order(trace.timestamps)


async def test_each_request_of_a_stream_has_its_own_trace(written, stub):
    async def requests():
        yield identity("a", bytes(8))
        yield identity("wrong", bytes(7))
        yield repeat_request("b", 3)
        yield repeat_request("none", 0)

    async for _ in stub.ModelStreamInfer(requests()):
        pass
    traces = await written()
    assert [trace.request_id for trace in traces] == ["a", "b", "none"]
    for trace in traces:
        assert trace.timestamps.keys() >= FRONTEND
        frontend = {name: trace.timestamps[name] for name in FRONTEND}
        check_order(frontend)
