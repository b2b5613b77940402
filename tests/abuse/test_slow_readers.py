"""Clients that do not read their responses, or hang up."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import grpc
import orjson
import pytest
from attack import AttackedServer, write_python_model
from eventually import wait_until
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = pytest.mark.alone

MIB = 1 << 20
WRITE_TIMEOUT = 3.0
PENDING = "nv_inference_pending_request_count"
# Sends as many responses of 64 KiB as the input says, as fast as possible.
FLOOD = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    {kind} execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(int(request.inputs()[0].as_numpy()[0])):
                if sender.is_cancelled():
                    break
                out = pb_utils.Tensor("OUT", np.array(["x" * 65536], np.object_))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
instance_group { count: 4 }
"""
OWN_PROCESS = 'parameters { key: "EXECUTION_MODE" value { string_value: "process" } }\n'
MODELS = {
    "flood": (CONFIG, "def"),
    "flood_async": (CONFIG, "async def"),
    "flood_process": (CONFIG + OWN_PROCESS, "def"),
}
# Passes on the responses of the model `flood`.
FORWARD = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            call = pb_utils.InferenceRequest(
                model_name="flood", inputs=request.inputs(), requested_output_names=["OUT"]
            )
            responses = call.exec(decoupled=True)
            for response in responses:
                if sender.is_cancelled():
                    responses.cancel()
                    break
                if response.has_error() or response.output_tensors():
                    sender.send(pb_utils.InferenceResponse(response.output_tensors(), response.error()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FORWARDING = {"forward": CONFIG, "forward_process": CONFIG + OWN_PROCESS}
CALL_BACKLOG_MIB = 16
NUM_RESPONSES = 4000  # 250 MiB per request


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name, (config, kind) in MODELS.items():
        write_python_model(repository, name, config, FLOOD.format(kind=kind))
    for name, config in FORWARDING.items():
        write_python_model(repository, name, config, FORWARD)
    large = f'parameters {{ key: "large" value {{ string_value: "{"x" * MIB}" }} }}\n'
    write_python_model(repository, "large", CONFIG + large, FLOOD.format(kind="def"))
    (repository / "pilot" / "1").mkdir(parents=True)
    (repository / "pilot" / "config.pbtxt").write_text('backend: "llm"')
    (repository / "pilot" / "1" / "model.json").write_text('{"model": "neso-pilot", "num_blocks": 2048}')
    flags = (
        f"--http-write-timeout-secs={WRITE_TIMEOUT}",
        f"--grpc-write-timeout={int(WRITE_TIMEOUT * 1000)}",
        f"--max-call-backlog={CALL_BACKLOG_MIB * MIB}",
    )
    with AttackedServer(*flags, repository=repository) as server:
        yield server


def connect(server: AttackedServer, *, receive_buffer: int = 1 << 16) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect(("127.0.0.1", server.ports["http"]))
    return connection


def post(path: str, body: object) -> bytes:
    data = orjson.dumps(body)
    return b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)


def is_closed(connection: socket.socket, request: bytes) -> bool:
    """Send a part of a request without reading. Returns whether the server has reset the connection."""
    with contextlib.suppress(BlockingIOError):
        try:
            connection.send(request)
        except (BrokenPipeError, ConnectionResetError):
            return True
    return False


def test_pipelined_requests(server: AttackedServer) -> None:
    request = b"GET /v2/models/large/config HTTP/1.1\r\nHost: h\r\n\r\n"

    def pipelined_requests_without_reading() -> None:
        with contextlib.ExitStack() as stack:
            left = {stack.enter_context(connect(server)) for _ in range(16)}
            for connection in left:
                connection.setblocking(False)
            end = time.monotonic() + 60
            while left and time.monotonic() < end:
                # The data that arrives must not renew the time that the client has to read.
                left = {each for each in left if not is_closed(each, request)}
                time.sleep(0.05)
            assert not left, f"{len(left)} connections are still open"

    server.attack(pipelined_requests_without_reading).check(limit_mib=16 * 1.5)


def request_without_reading(server: AttackedServer, model: str) -> None:
    """Request four event streams and read none of them until the server must have closed them."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(connect(server))
            connection.sendall(post(f"/v2/models/{model}/generate_stream", {"IN": [NUM_RESPONSES]}))
        time.sleep(3 * WRITE_TIMEOUT)


@pytest.mark.parametrize("model", MODELS)
def test_event_streams_of_a_decoupled_model(server: AttackedServer, model: str) -> None:
    server.attack(lambda: request_without_reading(server, model), f"event streams of {model}").check(
        limit_mib=4 * 16
    )
    assert_serves(server, model)


@pytest.mark.parametrize("model", FORWARDING)
def test_event_streams_of_a_model_that_passes_on_responses(server: AttackedServer, model: str) -> None:
    # Responses that wait for the calling model, and those that it keeps for a second loop. The shared memory of a
    # process counts in both processes, and strings are copied from it.
    limit_mib = 4 * (CALL_BACKLOG_MIB + 16) * (3 if model == "forward_process" else 1)
    server.attack(lambda: request_without_reading(server, model), f"event streams of {model}").check(
        limit_mib
    )
    assert_serves(server, model)


@pytest.mark.parametrize("model", MODELS)
def test_grpc_streams_of_a_decoupled_model(server: AttackedServer, model: str) -> None:
    def grpc_streams_without_reading() -> None:
        with contextlib.ExitStack() as stack:
            calls = []
            for number in range(4):
                options = [("grpc.use_local_subchannel_pool", 1), ("test.number", number)]
                channel = stack.enter_context(grpc.insecure_channel(server.address("grpc"), options=options))
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                calls.append(stub.ModelStreamInfer(one_request(model, NUM_RESPONSES)))
            time.sleep(3 * WRITE_TIMEOUT)
            for call in calls:
                call.cancel()

    server.attack(grpc_streams_without_reading, f"gRPC streams of {model}").check(limit_mib=4 * 16)
    assert_serves(server, model)


def one_request(model: str, num_responses: int) -> Iterator[service_pb2.ModelInferRequest]:
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="IN", datatype="INT32", shape=[1])
    tensor.contents.int_contents.append(num_responses)
    yield request


def assert_serves(server: AttackedServer, model: str) -> None:
    """The instances of the model are free again, and a client that reads gets all responses."""
    with grpc.insecure_channel(server.address("grpc")) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = list(stub.ModelStreamInfer(one_request(model, 200), timeout=60))
    assert len(responses) == 200 and not any(response.error_message for response in responses)


def test_abandoned_grpc_streams(server: AttackedServer) -> None:
    def abandoned_grpc_streams() -> None:
        for _ in range(24):
            with grpc.insecure_channel(server.address("grpc")) as channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                call = stub.ModelStreamInfer(one_request("flood", NUM_RESPONSES))
                next(iter(call))
                call.cancel()

    server.attack(abandoned_grpc_streams).check(limit_mib=64)


def test_chat_streams(server: AttackedServer) -> None:
    body = {
        "model": "pilot",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 200,
        "ignore_eos": True,
        "stream": True,
        "n": 4,
        "logprobs": True,
        "top_logprobs": 20,
    }

    def chat_streams_without_reading() -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(16):
                connection = stack.enter_context(connect(server, receive_buffer=2048))
                connection.sendall(post("/v1/chat/completions", body))
            time.sleep(3 * WRITE_TIMEOUT)

    server.attack(chat_streams_without_reading).check(limit_mib=16 * 2)
    status, _ = server.post("/v1/chat/completions", {**body, "stream": False, "max_tokens": 2})
    assert status == 200


HANG_UP = {
    "/v1/chat/completions": {"model": "pilot", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "pilot", "prompt": ["a", "b", "c"]},
    "/v2/models/pilot/generate_stream": {"text_input": "hi"},
}


@pytest.mark.parametrize("path", HANG_UP)
def test_clients_that_hang_up_leave_no_tracebacks(server: AttackedServer, path: str) -> None:
    body = {**HANG_UP[path], "max_tokens": 100, "ignore_eos": True, "stream": True}

    def clients_that_hang_up() -> None:
        for number in range(100):
            connection = connect(server)
            connection.sendall(post(path, body))
            if number % 3:  # otherwise at once
                connection.recv(500)
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()

    before = len(server.output)
    server.attack(clients_that_hang_up, f"clients of {path} that hang up").check()
    wait_until(lambda: server.gauge(PENDING) == 0)
    output = server.output[before:]
    assert "never retrieved" not in output and "Traceback" not in output, output


def test_requests_of_slow_readers_are_cancelled(server: AttackedServer) -> None:
    """Each instance of the model waits for a client that does not read. They are free after the write timeout."""
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(connect(server))
            connection.sendall(post("/v2/models/flood/generate_stream", {"IN": [NUM_RESPONSES]}))
        finished = threading.Event()

        def ask() -> None:
            assert_serves(server, "flood")
            finished.set()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        assert finished.wait(60)
