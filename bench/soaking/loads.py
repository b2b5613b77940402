"""Clients of the soak test. Each call of a load is one unit of work that checks its own response."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import grpc
import numpy as np
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2, service_pb2_grpc

from soaking.server import SHM_PREFIX, SoakServer

TIMEOUT = 30.0

Load = Callable[["Clients"], Awaitable[str]]
"""Executes one unit of work and returns its outcome: "ok", or the reason of an expected rejection."""


class UnexpectedResult(AssertionError):
    """The server behaved unexpectedly."""


class Clients:
    """Connections shared by the workers, and counters."""

    def __init__(self, server: SoakServer) -> None:
        self.server = server
        # Without the default limit of 100 connections: requests that wait for a model would delay all others.
        connector = aiohttp.TCPConnector(limit=0)
        self.http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(TIMEOUT))
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.ports['grpc']}")
        self.grpc = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.random = random.Random(0)
        self.numbers = itertools.count(1)
        self.answered: Counter[str] = Counter()  # successful requests by model
        self.texts: dict[str, str] = {}  # greedy continuations of the prompts
        self.chats: dict[str, str] = {}  # greedy answers to the prompts

    async def close(self) -> None:
        await self.http.close()
        await self._channel.close()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Send a POST request; return status, headers and body."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.server.url(path), data=data, headers=headers) as response:
            return response.status, dict(response.headers), await response.read()

    async def infer(self, model: str, body: Any, **headers: str) -> tuple[dict[str, Any], bytes]:
        """Send an infer request that must succeed; return the JSON and binary data of the response."""
        status, answer_headers, response = await self.post(f"/v2/models/{model}/infer", body, **headers)
        expect(status == 200, f"{model}: {status} {response[:200]!r}")
        length = int(answer_headers.get("Inference-Header-Content-Length", len(response)))
        self.answered[model] += 1
        return json.loads(response[:length]), response[length:]

    def vector(self) -> list[float]:
        return [float(self.random.randrange(1000)) for _ in range(self.random.choice([1, 16, 500]))]


def expect(truth: bool, what: str) -> None:
    if not truth:
        raise UnexpectedResult(what)


def tensor(values: list[Any], datatype: str, name: str = "IN") -> dict[str, Any]:
    return {"name": name, "shape": [len(values)], "datatype": datatype, "data": values}


async def http_json(clients: Clients) -> str:
    values = clients.vector()
    response, _ = await clients.infer("echo", {"inputs": [tensor(values, "FP32")]})
    expect(response["outputs"][0]["data"] == values, "echo has changed its input")
    return "ok"


async def http_binary(clients: Clients) -> str:
    blob = struct.pack("<1024f", *range(1024)) * clients.random.choice([1, 64])
    shape, parameters = [len(blob) // 4], {"binary_data_size": len(blob)}
    inputs = [{"name": "IN", "datatype": "FP32", "shape": shape, "parameters": parameters}]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    _, binary = await clients.infer("echo", head + blob, **headers)
    expect(binary == blob, "echo has changed its binary input")
    return "ok"


async def _batch(clients: Clients, model: str) -> str:
    values = clients.vector()[:16]
    body = {"inputs": [{**tensor(values, "FP32"), "shape": [1, len(values)]}]}
    response, _ = await clients.infer(model, body)
    expect(response["outputs"][0]["data"] == values, f"{model} has mixed up its batch")
    return "ok"


async def dynamic_batching(clients: Clients) -> str:
    return await _batch(clients, "batched")


async def ensemble(clients: Clients) -> str:
    return await _batch(clients, "pipeline")


def message(model: str, array: np.ndarray[Any, Any], name: str, datatype: str, id: str = "") -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, id=id, raw_input_contents=[array.tobytes()])
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    return request


async def grpc_unary(clients: Clients) -> str:
    array = np.array(clients.vector(), np.float32)
    response = await clients.grpc.ModelInfer(message("echo", array, "IN", "FP32"), timeout=TIMEOUT)
    expect(response.raw_output_contents[0] == array.tobytes(), "echo has changed its input over gRPC")
    clients.answered["echo"] += 1
    return "ok"


async def grpc_stream(clients: Clients) -> str:
    """Several decoupled requests on one stream; each must receive all its responses once and in order."""
    counts = {str(i): clients.random.randrange(12) for i in range(3)}
    requests = [message("repeat", np.array([n], np.int32), "COUNT", "INT32", id) for id, n in counts.items()]
    got: dict[str, list[int]] = {id: [] for id in counts}
    async for reply in clients.grpc.ModelStreamInfer(iter(requests), timeout=TIMEOUT):
        expect(not reply.error_message, reply.error_message)
        response = reply.infer_response
        got[response.id].append(int(np.frombuffer(response.raw_output_contents[0], np.int32)[0]))
    expect(got == {id: list(range(n)) for id, n in counts.items()}, f"responses were lost: {counts}, {got}")
    clients.answered["repeat"] += len(counts)
    return "ok"


async def cancel_stream(clients: Clients) -> str:
    """Cancel a stream with responses in flight."""
    requests = [message("repeat", np.array([200], np.int32), "COUNT", "INT32", "c")]
    call = clients.grpc.ModelStreamInfer(iter(requests), timeout=TIMEOUT)
    async for _ in call:
        break
    call.cancel()
    return "ok"


async def disconnect(clients: Clients) -> str:
    """Send a complete or partial request, then close the connection."""
    body = json.dumps({"inputs": [tensor(clients.vector(), "FP32")]}).encode()
    head = b"POST /v2/models/vanishing/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    wire = (head + body) * clients.random.choice([1, 1, 3])
    _, writer = await asyncio.open_connection("127.0.0.1", clients.server.ports["http"])
    writer.write(wire[: clients.random.choice([len(wire), clients.random.randrange(len(wire))])])
    await asyncio.sleep(clients.random.choice([0, 0.01]))
    writer.transport.abort()
    return "ok"


async def load_unload(clients: Clients) -> str:
    """Load and unload a model during requests, which must succeed or be rejected."""
    action = clients.random.choice(["load", "load", "unload"])
    change = clients.post(f"/v2/repository/models/spare/{action}", {})
    asks = [clients.post("/v2/models/spare/infer", {"inputs": [tensor([1.0], "FP32")]}) for _ in range(3)]
    (changed, _, text), *answers = await asyncio.gather(change, *asks)
    expect(changed == 200, f"{action}: {changed} {text[:200]!r}")
    for status, _, response in answers:
        expect(status in (200, 400, 404, 503), f"a model that comes and goes: {status} {response[:200]!r}")
    return "ok" if all(status == 200 for status, _, _ in answers) else "not loaded"


async def shared_memory(clients: Clients) -> str:
    """Infer through a shared-memory region, which is unregistered afterwards."""
    number = next(clients.numbers)
    name, key, size = f"soak{number}", f"{SHM_PREFIX}{number}", 256
    handle = shm.create_shared_memory_region(name, key, 2 * size)
    prefix = f"/v2/systemsharedmemory/region/{name}"
    try:
        array = np.arange(size // 4, dtype=np.float32) + number
        shm.set_shared_memory_region(handle, [array])
        status, _, text = await clients.post(f"{prefix}/register", {"key": key, "byte_size": 2 * size})
        expect(status == 200, f"register: {text!r}")
        window = {"shared_memory_region": name, "shared_memory_byte_size": size}
        given = {"name": "IN", "datatype": "FP32", "shape": [size // 4], "parameters": window}
        output = {"name": "OUT", "parameters": {**window, "shared_memory_offset": size}}
        await clients.infer("shared", {"inputs": [given], "outputs": [output]})
        back = shm.get_contents_as_numpy(handle, np.float32, [size // 4], offset=size)
        expect(bool((back == array).all()), "shared memory has not come back")
        status, _, text = await clients.post(f"{prefix}/unregister", {})
        expect(status == 200, f"unregister: {text!r}")
    finally:
        shm.destroy_shared_memory_region(handle)
    return "ok"


async def sequence(clients: Clients) -> str:
    """Check that each sequence keeps its own sum."""
    number, total = next(clients.numbers), 0
    values = [clients.random.randrange(100) for _ in range(5)]
    for i, value in enumerate(values):
        parameters = {"sequence_id": number, "sequence_start": i == 0, "sequence_end": i == len(values) - 1}
        body = {"inputs": [{**tensor([value], "INT32"), "shape": [1, 1]}], "parameters": parameters}
        response, _ = await clients.infer("sum", body)
        total += value
        expect(response["outputs"][0]["data"] == [total], f"a sequence has lost count: {response}, {total}")
    return "ok"


async def crash(clients: Clients) -> str:
    """A model process crashes on one request in ten; it is restarted and the server continues."""
    dies = clients.random.randrange(10) == 0
    body = {"inputs": [tensor([-1 if dies else 1], "INT32")]}
    status, _, response = await clients.post("/v2/models/crasher/infer", body)
    expect(status in ((500, 503) if dies else (200, 400, 500, 503)), f"crasher: {status} {response[:200]!r}")
    return "ok" if status == 200 or dies else "restarting"


async def has_own_process(clients: Clients) -> bool:
    """Whether models run in processes (EXECUTION_MODE); crash tests require it."""
    status, _, response = await clients.post("/v2/models/crasher/infer", {"inputs": [tensor([1], "INT32")]})
    return status == 200 and json.loads(response)["outputs"][0]["data"] != [clients.server.pid]


LOADS: dict[Load, int] = {
    http_json: 2,
    http_binary: 1,
    dynamic_batching: 2,
    ensemble: 1,
    grpc_unary: 2,
    grpc_stream: 1,
    cancel_stream: 1,
    disconnect: 1,
    load_unload: 1,
    shared_memory: 1,
    sequence: 2,
    crash: 1,
}
"""Number of workers of each load."""
