"""Ended requests are freed without the garbage collector, which servers rarely run (`freeze_gc`).

The tests collect what only reference cycles keep alive. None of it may belong to Neso.
"""

from __future__ import annotations

import asyncio
import gc
import http.client
import socket
import struct
import types
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.grpc as grpc_client
import uvloop
from eventually import until
from tritonclient.grpc import service_pb2, service_pb2_grpc

import neso.frontends.openai
from neso.frontends.frontend_options import GrpcOptions, HttpOptions
from neso.frontends.kserve.grpc_frontend import KServeGrpc
from neso.frontends.kserve.http_frontend import KServeHttp
from neso.server.core import Core
from neso.server.options import ServerOptions

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests
        ]
"""
FAILING = IDENTITY.replace("return [", "raise ValueError([").replace(
    "for r in requests\n        ]", "for r in requests\n        ])"
)
REPEAT = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(int(request.inputs()[0].as_numpy()[0])):
                if sender.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())]))
                time.sleep(0.001)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"
ENDLESS = 1_000_000.0


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """The server's event loop."""
    return {"uvloop": uvloop.new_event_loop}


class Ports:
    """A running server."""

    def __init__(self, core: Core, http: int, grpc: int) -> None:
        self.core = core
        self.http = http
        self.grpc = grpc

    def in_flight(self) -> int:
        return sum(model.in_flight_count for model in self.core.models())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Ports]:
    for name, code, config in (
        ("identity", IDENTITY, CONFIG),
        ("failing", FAILING, CONFIG),
        ("repeat", REPEAT, DECOUPLED),
    ):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        (tmp_path / name / "1" / "model.py").write_text(code)
    (tmp_path / "pilot" / "1").mkdir(parents=True)
    (tmp_path / "pilot" / "config.pbtxt").write_text('backend: "llm"')
    (tmp_path / "pilot" / "1" / "model.json").write_bytes(
        orjson.dumps({"model": "neso-pilot", "num_blocks": 256})
    )
    core = Core(ServerOptions((tmp_path,), exit_timeout=1, backend_config={"llm": {"in-process": "true"}}))
    await core.start()
    assert core.ready(), core.repository_index()
    http = KServeHttp(core, HttpOptions("127.0.0.1", 0))
    http.mount("/v1", neso.frontends.openai.create_app(core))
    grpc = KServeGrpc(core, GrpcOptions("127.0.0.1", 0))
    await http.start()
    await grpc.start()
    yield Ports(core, http.port, grpc.port)
    await grpc.stop(0)
    await http.stop(0)
    await core.stop()


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.disable()
    gc.collect()
    gc.freeze()  # what exists already may stay
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()
    gc.enable()


def cycles() -> Counter[str]:
    """Collect, and return the number of Neso's objects that only cycles kept alive, by type."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(filter(None, map(_name, gc.garbage)))
    gc.garbage.clear()
    gc.collect()
    return found


def _name(garbage: object) -> str:
    """Return the name of an object of Neso's code, "" for others."""
    if isinstance(garbage, types.FrameType | types.CoroutineType | types.AsyncGeneratorType):
        code = getattr(garbage, "f_code", None) or getattr(garbage, "cr_code", None) or garbage.ag_code
        name = getattr(code, "co_qualname", code.co_name)
        return f"{type(garbage).__name__} {name}" if "/neso/" in code.co_filename else ""
    kind = type(garbage)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__.startswith("neso.") else ""


# Clients. They run in a thread; the server runs on the test's event loop.


def http_post(port: int, path: str, body: Any) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, orjson.dumps(body))
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def http_abandon(port: int, path: str, body: Any) -> int:
    """Read the beginning of a response, and reset the connection."""
    data = orjson.dumps(body)
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)
        )
        status = int(connection.recv(200).split()[1])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return status


TENSOR = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
CHAT = {"model": "pilot", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LONG = {"max_tokens": 500, "ignore_eos": True, "stream": True}


def infer_message(model: str, value: float) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="IN", datatype="FP32", shape=[1])
    tensor.contents.fp32_contents.append(value)
    return request


def grpc_unary(port: int, model: str) -> None:
    with grpc_client.InferenceServerClient(f"127.0.0.1:{port}") as client:
        tensor = grpc_client.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        try:
            client.infer(model, [tensor])
        except grpc_client.InferenceServerException:
            assert model != "identity"


def grpc_metadata(port: int, model: str) -> None:
    with grpc_client.InferenceServerClient(f"127.0.0.1:{port}") as client:
        try:
            client.get_model_metadata(model)
        except grpc_client.InferenceServerException:
            assert model == "none"


def grpc_streams(port: int, model: str, value: float, *, cancel: bool) -> None:
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(iter([infer_message(model, value)] * 3))
        for number, _ in enumerate(call):
            if cancel and number == 3:
                call.cancel()
                break


Attack = Callable[[Ports], object]
REQUESTS: dict[str, Attack] = {
    "http infer": lambda s: http_post(s.http, "/v2/models/identity/infer", TENSOR),
    "http infer that fails": lambda s: http_post(s.http, "/v2/models/failing/infer", TENSOR),
    "http infer of an unknown model": lambda s: http_post(s.http, "/v2/models/none/infer", TENSOR),
    "http infer with invalid tensors": lambda s: http_post(
        s.http, "/v2/models/identity/infer", {"inputs": [1]}
    ),
    "generate": lambda s: http_post(s.http, "/v2/models/repeat/generate", {"IN": [1.0]}),
    "generate_stream": lambda s: http_post(s.http, "/v2/models/repeat/generate_stream", {"IN": [3.0]}),
    "generate_stream of text": lambda s: http_post(
        s.http, "/v2/models/pilot/generate_stream", {"text_input": "hi", "stream": True, "max_tokens": 4}
    ),
    "abandoned generate_stream": lambda s: http_abandon(
        s.http, "/v2/models/repeat/generate_stream", {"IN": [ENDLESS]}
    ),
    "chat": lambda s: http_post(s.http, "/v1/chat/completions", CHAT),
    "chat of an unknown model": lambda s: http_post(
        s.http, "/v1/chat/completions", {**CHAT, "model": "none"}
    ),
    "chat stream": lambda s: http_post(s.http, "/v1/chat/completions", {**CHAT, "stream": True}),
    "abandoned chat stream": lambda s: http_abandon(s.http, "/v1/chat/completions", {**CHAT, **LONG}),
    "completions of several prompts": lambda s: http_post(
        s.http, "/v1/completions", {"model": "pilot", "prompt": ["a", "b"], "n": 2, "max_tokens": 3}
    ),
    "completions with an invalid prompt": lambda s: http_post(
        s.http, "/v1/completions", {"model": "pilot", "prompt": ["a", "b " * 5000]}
    ),
    "abandoned stream of several prompts": lambda s: http_abandon(
        s.http, "/v1/completions", {"model": "pilot", "prompt": ["a", "b"], **LONG}
    ),
    "grpc infer": lambda s: grpc_unary(s.grpc, "identity"),
    "grpc infer that fails": lambda s: grpc_unary(s.grpc, "failing"),
    "grpc infer of an unknown model": lambda s: grpc_unary(s.grpc, "none"),
    "grpc metadata": lambda s: grpc_metadata(s.grpc, "identity"),
    "grpc metadata of an unknown model": lambda s: grpc_metadata(s.grpc, "none"),
    "grpc stream": lambda s: grpc_streams(s.grpc, "identity", 1.0, cancel=False),
    "grpc stream that fails": lambda s: grpc_streams(s.grpc, "failing", 1.0, cancel=False),
    "grpc stream of a decoupled model": lambda s: grpc_streams(s.grpc, "repeat", 3.0, cancel=False),
    "abandoned grpc stream": lambda s: grpc_streams(s.grpc, "repeat", ENDLESS, cancel=True),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_requests_leave_no_cycles(server: Ports, no_gc: None, name: str) -> None:
    run = REQUESTS[name]
    for _ in range(2):  # what the first request creates may stay
        await asyncio.to_thread(run, server)
        await until(lambda: server.in_flight() == 0)
    cycles()
    for _ in range(3):
        await asyncio.to_thread(run, server)
        await until(lambda: server.in_flight() == 0)
    await asyncio.sleep(0.05)  # closed connections
    assert cycles() == Counter()


async def test_tensors_of_an_abandoned_stream_are_freed(server: Ports, no_gc: None) -> None:
    from neso.server.inference_request import InferenceRequest
    from neso.server.tensor import Tensor

    tensor = Tensor.from_numpy("IN", np.full(1, ENDLESS, np.float32))
    alive = weakref.ref(tensor.array)
    stream = server.core.model("repeat").submit(InferenceRequest("repeat", {"IN": tensor}))
    del tensor
    await anext(stream)
    stream.cancel()
    del stream
    await until(lambda: server.in_flight() == 0)
    await until(lambda: alive() is None)
