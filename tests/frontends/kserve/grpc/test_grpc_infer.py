"""ModelInfer."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import ml_dtypes
import numpy as np
import pytest
from eventually import until
from kserve_backends import Wait
from kserve_grpc_requests import one_input, waiting_request
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput, service_pb2
from tritonclient.utils import InferenceServerException

NUMBERS = {
    "BOOL": np.array([True, False, True]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP32": np.array([-1.5, np.inf], np.float32),
    "FP64": np.array([-1.5, 1e300]),
}
RAW_ONLY = {"FP16": np.array([1.5, -2], np.float16), "BF16": np.array([1.5, -2], ml_dtypes.bfloat16)}
TEXT = np.array([b"", b"\x00\xff", "Grüße".encode()], np.object_)
CONTENTS = {
    "BOOL": "bool_contents",
    "UINT64": "uint64_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
} | {f"{sign}INT{bits}": f"{sign.lower()}int_contents" for sign in ("", "U") for bits in (8, 16, 32)}


def tensor(datatype: str, array: np.ndarray) -> InferInput:
    made = InferInput(f"IN_{datatype}", array.shape, datatype)
    if datatype == "BF16":  # tritonclient expects float32 for BF16; set the raw bytes instead
        made._raw_content = array.tobytes()
    else:
        made.set_data_from_numpy(array)
    return made


def request(**fields) -> service_pb2.ModelInferRequest:
    return service_pb2.ModelInferRequest(model_name="identity", **fields)


@pytest.mark.parametrize("client_kind", ["sync", "aio"])
async def test_datatypes_round_trip(server, client, client_kind):
    arrays = NUMBERS | RAW_ONLY | {"BYTES": TEXT}
    inputs = [tensor(datatype, array) for datatype, array in arrays.items()]
    if client_kind == "aio":
        result = await client.infer("identity", inputs, request_id="7")
    else:
        with InferenceServerClient(f"127.0.0.1:{server.port}") as sync:
            result = await asyncio.to_thread(sync.infer, "identity", inputs, request_id="7")
    reply = result.get_response()
    assert (reply.model_name, reply.model_version, reply.id) == ("identity", "1", "7")
    assert [output.name for output in reply.outputs] == [f"OUT_{datatype}" for datatype in arrays]
    for (datatype, array), raw in zip(arrays.items(), reply.raw_output_contents, strict=True):
        if datatype == "BF16":
            assert raw == array.tobytes()
        else:
            np.testing.assert_array_equal(result.as_numpy(f"OUT_{datatype}"), array)


@pytest.mark.parametrize("datatype", CONTENTS)
async def test_typed_contents(stub, datatype):
    array = TEXT if datatype == "BYTES" else NUMBERS[datatype]
    contents = {CONTENTS[datatype]: array.tolist()}
    reply = await stub.ModelInfer(request(inputs=[one_input(datatype, array.shape, contents=contents)]))
    [raw] = reply.raw_output_contents
    if datatype == "BYTES":
        assert raw == b"".join(len(each).to_bytes(4, "little") + each for each in TEXT)
    else:
        assert raw == array.tobytes()


async def test_large_and_empty_tensors(client):
    large = np.arange(300_000, dtype=np.float32)
    inputs = [
        tensor("FP32", large),
        tensor("INT8", np.zeros(0, np.int8)),
        tensor("UINT8", np.ones(9, np.uint8)),
    ]
    result = await client.infer("identity", inputs)
    np.testing.assert_array_equal(result.as_numpy("OUT_FP32"), large)
    assert result.as_numpy("OUT_INT8").shape == (0,)
    np.testing.assert_array_equal(result.as_numpy("OUT_UINT8"), np.ones(9, np.uint8))


async def test_requested_outputs(client):
    inputs = [tensor(datatype, NUMBERS[datatype]) for datatype in ("INT32", "FP32")]
    result = await client.infer("identity", inputs, outputs=[InferRequestedOutput("OUT_FP32")])
    assert [output.name for output in result.get_response().outputs] == ["OUT_FP32"]


async def test_parameters_round_trip(stub):
    sent = {
        "b": {"bool_param": True},
        "i": {"int64_param": -3},
        "u": {"uint64_param": 2**64 - 1},
        "d": {"double_param": 0.5},
        "s": {"string_param": "x"},
        # Request fields, not parameters:
        "priority": {"uint64_param": 2},
        "timeout": {"int64_param": 5},
        "sequence_id": {"string_param": "s"},
        "sequence_start": {"bool_param": True},
    }
    reply = await stub.ModelInfer(
        request(inputs=[one_input()], raw_input_contents=[bytes(8)], parameters=sent)
    )
    read = {
        key: getattr(value, value.WhichOneof("parameter_choice")) for key, value in reply.parameters.items()
    }
    assert read == {"b": True, "i": -3, "u": 2**64 - 1, "d": 0.5, "s": "x"}
    assert reply.parameters["u"].WhichOneof("parameter_choice") == "uint64_param"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"inputs": [one_input()], "raw_input_contents": [bytes(7)]},
            "input byte size mismatch for input 'IN_FP32' for model 'identity'. Expected 8, got 7",
        ),
        (
            {"inputs": [one_input(datatype="FP33")], "raw_input_contents": [b""]},
            "'FP33' for tensor 'IN_FP33'",
        ),
        (
            {
                "inputs": [one_input()],
                "raw_input_contents": [bytes(8)],
                "outputs": [{"name": "OUT_FP32"}, {"name": "OUT_FP32"}],
            },
            "output 'OUT_FP32' already exists in request",
        ),
        ({"inputs": [one_input(shape=[1] * 33)], "raw_input_contents": [bytes(4)]}, "it has 33 dimensions"),
        ({"inputs": [one_input(shape=[0, 2**62])], "raw_input_contents": [b""]}, "exceed maximum size"),
        ({"inputs": [one_input(shape=[-1])], "raw_input_contents": [b""]}, "negative dimension"),
        ({"inputs": [one_input()], "raw_input_contents": [bytes(8)] * 2}, "got 2 for 1 inputs"),
        (
            {
                "inputs": [one_input(contents={"fp32_contents": [1, 2]}), one_input("INT8")],
                "raw_input_contents": [bytes(8)],
            },
            "contents field must not be specified when using raw_input_contents for 'IN_FP32'",
        ),
        (
            {"inputs": [one_input(contents={"fp32_contents": [1, 2]})], "raw_input_contents": [bytes(8)]},
            "contents field must not be specified",
        ),
        ({"inputs": [one_input(contents={"fp32_contents": [1]})]}, "1 in fp32_contents for input 'IN_FP32'"),
        ({"inputs": [one_input(contents={"int_contents": [1, 2]})]}, "int_contents cannot hold FP32"),
        ({"inputs": [one_input()]}, "elements 0 in fp32_contents for input 'IN_FP32', expecting 2"),
        (
            {"inputs": [one_input("INT8", contents={"int_contents": [1, 300]})]},
            "element of input 'IN_INT8' is out of the range of INT8",
        ),
        ({"inputs": [one_input("FP16")]}, "FP16, which needs raw_input_contents"),
        ({"inputs": [one_input("BYTES")], "raw_input_contents": [b"\x09\0\0\0abcd"]}, "input 'IN_BYTES'"),
        (
            {"inputs": [one_input(), one_input()], "raw_input_contents": [bytes(8)] * 2},
            "input 'IN_FP32' already exists in request",
        ),
        (
            {"inputs": [one_input(name="X")], "raw_input_contents": [bytes(8)]},
            "unexpected inference input 'X'",
        ),
        (
            {"inputs": [one_input()], "raw_input_contents": [bytes(8)], "outputs": [{"name": "Y"}]},
            "unexpected inference output 'Y'",
        ),
        ({"parameters": {"triton_x": {"bool_param": True}}}, "'triton_x'.*reserved"),
        (
            {"parameters": {"sequence_start": {"int64_param": 1}}},
            "'sequence_start' parameter, expected bool_param",
        ),
        ({"parameters": {"timeout": {"int64_param": -1}}}, "'timeout' must not be negative"),
        ({"parameters": {"p": {}}}, "invalid value type for 'p' parameter"),
    ],
)
async def test_invalid_requests(stub, fields, words):
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await stub.ModelInfer(request(**fields))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff\xff", b"\x3a\xff\xff\xff\x7f" + bytes(100_000), b"\x80" * 100_000, b"\x0f" * 100_000],
    ids=["small", "cut_off", "endless_number", "unknown_kind"],
)
async def test_malformed_messages(server, data):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="malformed ModelInferRequest") as caught:
            await channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(data)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"inputs": [one_input(parameters={"shared_memory_region": {"string_param": "r"}})]},
            "client shared memory is disabled",
        ),
    ],
)
async def test_unsupported_features(stub, fields, words):
    with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
        await stub.ModelInfer(request(raw_input_contents=[bytes(8)], **fields))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_decoupled_models_are_rejected(client):
    count = InferInput("COUNT", [1], "INT32")
    count.set_data_from_numpy(np.ones(1, np.int32))
    words = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    with pytest.raises(InferenceServerException, match=words) as caught:
        await client.infer("repeat", [count])
    assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


async def test_unknown_model_and_version(client):
    with pytest.raises(
        InferenceServerException, match="Request for unknown model: 'nobody' is not found"
    ) as caught:
        await client.infer("nobody", [])
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    with pytest.raises(InferenceServerException, match="'identity' version 7 is not found"):
        await client.infer("identity", [], model_version="7")


@pytest.mark.parametrize(
    ("parameter", "words"), [("fail", "by intent"), ("raise", "a bug"), ("twice", "a single response")]
)
async def test_backend_errors_are_internal(client, parameter, words):
    inputs = [tensor("FP32", NUMBERS["FP32"])]
    with pytest.raises(InferenceServerException, match=words) as caught:
        await client.infer("identity", inputs, parameters={parameter: "by intent"})
    assert caught.value.status() == "StatusCode.INTERNAL"


async def test_cancel_reaches_the_backend(stub):
    call = stub.ModelInfer(waiting_request("a"))
    await until(lambda: Wait.waiting)
    call.cancel()
    await until(lambda: Wait.cancelled == ["a"])


async def test_disconnect_cancels_the_request(server):
    sync = InferenceServerClient(f"127.0.0.1:{server.port}")
    x = InferInput("X", [1, 1], "INT32")
    x.set_data_from_numpy(np.ones((1, 1), np.int32))
    sync.async_infer("wait", [x], lambda result, error: None, request_id="b")
    await until(lambda: Wait.waiting)
    await asyncio.to_thread(sync.close)
    await until(lambda: Wait.cancelled == ["b"])


async def test_deadline_cancels_the_request(stub):
    for timeout in (0.2, 1, 10):  # a call with a deadline that expires before sending does not arrive
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(waiting_request("c"), timeout=timeout)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if Wait.waiting:
            break
    await until(lambda: Wait.cancelled and len(Wait.cancelled) == len(Wait.waiting))


async def test_stop_aborts_requests_after_the_grace_period(server, stub):
    call = asyncio.ensure_future(_reply(stub, "d"))
    await until(lambda: Wait.waiting)
    await server.stop(grace=0.1)
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert Wait.cancelled == ["d"]


async def _reply(stub, request_id: str):
    return await stub.ModelInfer(waiting_request(request_id))
