"""Fuzzing of the gRPC frontend: random fields, bytes and orders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from fuzz_oracle import check_message
from fuzz_profile import fuzz_settings
from fuzz_server import MODELS, TYPES, FuzzServer
from hypothesis import example, given
from hypothesis import strategies as st
from protobuf_messages import filled
from tritonclient.grpc import service_pb2, service_pb2_grpc

TIMEOUT = 30.0
SERVICE = "/inference.GRPCInferenceService/"
Code = grpc.StatusCode
# INTERNAL and UNKNOWN would be server bugs, DEADLINE_EXCEEDED a hang.
CODES = {
    Code.OK, Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.UNAVAILABLE, Code.UNIMPLEMENTED, Code.ALREADY_EXISTS,
    Code.CANCELLED,
}  # fmt: skip

NAMES = {
    "inference.ModelInferRequest.model_name": st.sampled_from([*MODELS, "absent", "", "a\0b"]),
    "inference.ModelInferRequest.model_version": st.sampled_from(["", "1", "2", "x", "-1", "9" * 30, "9" * 5000]),
    "inference.ModelInferRequest.InferInputTensor.name": st.sampled_from(
        ["IN", "IN_FP32", "IN_BYTES", "PROMPT", "COUNT", "x", ""]
    ),
    "inference.ModelInferRequest.InferInputTensor.datatype": st.sampled_from([*TYPES, "", "FP31"]),
    "inference.ModelInferRequest.InferInputTensor.shape": st.sampled_from([0, 1, 1, 2, 2, 3, -1, 2**62, 2**63 - 1]),
    "inference.ModelInferRequest.InferRequestedOutputTensor.name": st.sampled_from(["OUT", "OUT_FP32", "TEXT", "x"]),
    "inference.ModelInferRequest.ParametersEntry.key": st.sampled_from(
        ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "triton_enable_empty_final_response",
         "triton_x", "x", ""]
    ),
    "inference.InferParameter.uint64_param": st.integers(0, 2**64 - 1),
}  # fmt: skip


def good_message(model: str) -> Any:
    """Return a valid request."""
    name, datatype, shape, raw = {
        "echo": ("IN_FP32", "FP32", [2], bytes(8)),
        "batched": ("IN", "FP32", [1, 1, 2], bytes(8)),
        "pipeline": ("IN", "FP32", [1, 1, 2], bytes(8)),
        "sequence": ("IN", "INT32", [1, 1], bytes(4)),
        "text": ("PROMPT", "BYTES", [1], b"\2\0\0\0hi"),
        "repeat": ("COUNT", "INT32", [1], np.array([3], np.int32).tobytes()),
    }[model]
    message = service_pb2.ModelInferRequest(model_name=model, id="5", raw_input_contents=[raw])
    message.inputs.add(name=name, datatype=datatype, shape=shape)
    if model == "sequence":
        message.parameters["sequence_id"].int64_param = 4
        for flag in ("sequence_start", "sequence_end"):
            message.parameters[flag].bool_param = True
    return message


@st.composite
def infer_requests(draw: st.DrawFn) -> Any:
    """Return a valid request with additional random fields, and possibly without some."""
    model = draw(st.sampled_from(MODELS))
    message = draw(filled(lambda: good_message(model), NAMES, max_fields=2))
    # COUNT is the number of responses; a random one may take too long.
    if message.model_name == "repeat" and draw(st.booleans()):
        message.raw_input_contents[:] = [np.array([draw(st.integers(-2, 9))], np.int32).tobytes()]
    for field in draw(
        st.lists(st.sampled_from(["inputs", "raw_input_contents", "parameters", "model_name"]), max_size=1)
    ):
        message.ClearField(field)
    return message


@pytest.fixture(scope="module")
def channel(server: FuzzServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc.port}") as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> service_pb2_grpc.GRPCInferenceServiceStub:
    return service_pb2_grpc.GRPCInferenceServiceStub(channel)


def check_status(code: grpc.StatusCode, details: str) -> None:
    internal = code is Code.INTERNAL and details.startswith(
        ("load failed", "failed to load", "Unable to open")
    )
    assert code in CODES or internal, (code, details)
    if code is not Code.OK:
        check_message(details)


def call(method: Any, message: Any) -> Any:
    """Return the reply, or None for an error with a client message."""
    try:
        return method(message, timeout=TIMEOUT)
    except grpc.RpcError as error:
        check_status(error.code(), error.details())
        return None


def requests_many_responses(message: Any) -> bool:
    """Return whether the decoupled model would send too many responses to wait for."""
    raw = b"".join(message.raw_input_contents)
    counts = [n for tensor in message.inputs for n in tensor.contents.int_contents]
    return message.model_name == "repeat" and (
        any(count > 50 for count in counts)
        or (len(raw) == 4 and int.from_bytes(raw, "little", signed=True) > 50)
    )


@fuzz_settings
@given(infer_requests())
def test_infer(server, stub, message):
    call(stub.ModelInfer, message)
    server.check_sane()


@fuzz_settings
@given(st.lists(infer_requests(), min_size=1, max_size=5), st.booleans(), st.booleans())
def test_streams(server, stub, messages, status_errors, hang_up):
    messages = [message for message in messages if not requests_many_responses(message)]
    metadata = [("triton_grpc_error", "true")] if status_errors else []
    stream = stub.ModelStreamInfer(iter(messages), timeout=TIMEOUT, metadata=metadata)
    try:
        for response in stream:
            if response.error_message:
                check_message(response.error_message)
            if hang_up:
                stream.cancel()
                break
    except grpc.RpcError as error:
        check_status(error.code(), error.details())
    server.check_sane()


@fuzz_settings
@given(st.binary(max_size=200) | infer_requests().map(lambda message: message.SerializeToString()), st.data())
@example(good_message("echo").SerializeToString() + b"\x3a\xff\xff\xff\xff\x0f", None)
def test_random_bytes_as_messages(server, channel, wire, data):
    if data is not None and wire:
        at = data.draw(st.integers(0, len(wire) - 1))
        wire = wire[:at] + data.draw(st.binary(max_size=3)) + wire[at + data.draw(st.integers(0, 2)) :]
        wire += bytes(data.draw(st.sampled_from([0, 0, 70_000])))
    call(channel.unary_unary(SERVICE + "ModelInfer"), wire)
    server.check_sane()


MANAGEMENT = {
    "ServerLive": ("ServerLiveRequest", {}),
    "ModelReady": ("ModelReadyRequest", {"name": [*MODELS, "x"]}),
    "ModelMetadata": ("ModelMetadataRequest", {"name": [*MODELS, "x"]}),
    "ModelConfig": ("ModelConfigRequest", {"name": [*MODELS, "x"]}),
    "ModelStatistics": ("ModelStatisticsRequest", {"name": [*MODELS, "x", ""]}),
    "RepositoryIndex": ("RepositoryIndexRequest", {}),
    "RepositoryModelLoad": ("RepositoryModelLoadRequest", {"model_name": ["absent", "", "..", "a/b", "\0"]}),
    "RepositoryModelUnload": ("RepositoryModelUnloadRequest", {"model_name": ["absent", "", ".."]}),
    "SystemSharedMemoryStatus": ("SystemSharedMemoryStatusRequest", {}),
    "SystemSharedMemoryRegister": ("SystemSharedMemoryRegisterRequest", {}),
    "SystemSharedMemoryUnregister": ("SystemSharedMemoryUnregisterRequest", {}),
    "CudaSharedMemoryRegister": ("CudaSharedMemoryRegisterRequest", {}),
    "TraceSetting": ("TraceSettingRequest", {}),
    "LogSettings": ("LogSettingsRequest", {}),
}


@fuzz_settings
@given(st.sampled_from(sorted(MANAGEMENT)), st.data())
def test_management(server, stub, method, data):
    kind, names = MANAGEMENT[method]
    overrides = {f"inference.{kind}.{field}": st.sampled_from(values) for field, values in names.items()}
    keys = ["config", "file:1/model.py", "file:../x", "file:", "unload_dependents", "x"]
    for entry in ("RepositoryModelLoadRequest", "RepositoryModelUnloadRequest"):
        overrides[f"inference.{entry}.ParametersEntry.key"] = st.sampled_from(keys)
    call(getattr(stub, method), data.draw(filled(getattr(service_pb2, kind), overrides)))
    server.check_sane()


@pytest.mark.parametrize("model", MODELS)
def test_valid_messages_succeed(server, stub, model):
    """Otherwise the fuzz tests above would pass trivially."""
    message = good_message(model)
    responses = list(stub.ModelStreamInfer(iter([message]), timeout=TIMEOUT))
    assert [response.error_message for response in responses] == [""] * (3 if model == "repeat" else 1)


def test_no_requests_or_tasks_remain(server):
    """Runs last."""
    server.check_idle()
