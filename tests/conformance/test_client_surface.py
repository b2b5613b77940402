"""Every public method of `tritonclient`'s four clients and their tensors, against a real server.

A scenario is shared by all clients. The last test fails for each method that no scenario calls.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import parameters_model
import pytest
import tritonclient.http.auth
import tritonclient.utils.shared_memory as shm
from client_modules import CLASSES, ClientModule, client_modules, maybe_await
from google.protobuf.json_format import MessageToDict
from server_process import ServerProcess
from test_client_shared_memory import CONFIG as DOUBLE_CONFIG
from test_client_shared_memory import MODEL as DOUBLE
from tritonclient.utils import InferenceServerException

REPEAT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([i], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REPEAT_CONFIG = """
backend: "python"
input { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""
X = np.array([0, 1, 2, 3], np.float32)  # the model sleeps for the first number of seconds
S = np.array([b"one", b"", "drei §".encode()], np.object_)

CLIENT_MODULES = client_modules()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    parameters_model.write(path)
    for name, code, config in (("double", DOUBLE, DOUBLE_CONFIG), ("repeat", REPEAT, REPEAT_CONFIG)):
        (path / name / "1").mkdir(parents=True)
        (path / name / "1" / "model.py").write_text(code)
        (path / name / "config.pbtxt").write_text(config)
    return path


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(
        f"--model-repository={repository}",
        "--model-control-mode=explicit",
        "--load-model=*",
        "--allow-client-shm=true",
        "--http-header-forward-pattern=^(authorization|x-)",
        "--grpc-header-forward-pattern=^(authorization|x-)",
    ) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(params=CLIENT_MODULES, ids=lambda client_module: client_module.name)
def client_module(request: pytest.FixtureRequest) -> ClientModule:
    return request.param


def inputs(client_module: ClientModule, **options: Any) -> list[Any]:
    return [client_module.input("X", X, "FP32", **options), client_module.input("S", S, "BYTES", **options)]


def as_dict(client_module: ClientModule) -> dict[str, Any]:
    """Return the argument that makes a gRPC client respond like an HTTP client."""
    return {"as_json": True} if client_module.protocol == "grpc" else {}


async def parameters_seen(client_module: ClientModule, client: Any, **options: Any) -> dict[str, Any]:
    """Return the parameters of an infer request with these options as the model receives them."""
    tensor = client_module.input("IN", np.array([b"x"], np.object_), "BYTES")
    result = await maybe_await(client.infer("parameters", [tensor], **options))
    return json.loads(result.as_numpy("OUT")[0])


async def health_and_metadata(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    assert await maybe_await(client.is_server_live())
    assert await maybe_await(client.is_server_ready())
    assert await maybe_await(client.is_model_ready("double"))
    assert await maybe_await(client.is_model_ready("double", "1"))
    assert not await maybe_await(client.is_model_ready("nobody"))
    metadata = await maybe_await(client.get_server_metadata(**as_dict(client_module)))
    assert metadata["name"] == "neso" and "system_shared_memory" in metadata["extensions"]
    metadata = await maybe_await(client.get_model_metadata("double", "1", **as_dict(client_module)))
    assert metadata["versions"] == ["1"] and metadata["platform"] == "python"
    assert {entry["name"]: entry["datatype"] for entry in metadata["inputs"]} == {"X": "FP32", "S": "BYTES"}
    config = await maybe_await(client.get_model_config("repeat", **as_dict(client_module)))
    assert config.get("config", config)["model_transaction_policy"] == {"decoupled": True}
    for call in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        with pytest.raises(InferenceServerException, match="nobody"):
            await maybe_await(call("nobody"))


async def statistics(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    async def count() -> int:
        reply = await maybe_await(client.get_inference_statistics("double", "1", **as_dict(client_module)))
        [stats] = reply["model_stats"]
        return int(stats.get("inference_count", 0))

    before = await count()
    await maybe_await(client.infer("double", inputs(client_module)))
    assert await count() > before  # requests of other tests may have ended in between
    everything = await maybe_await(client.get_inference_statistics(**as_dict(client_module)))
    assert {stats["name"] for stats in everything["model_stats"]} >= {"double", "repeat", "parameters"}


async def repository_control(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    async def states() -> dict[str, str]:
        index = await maybe_await(client.get_model_repository_index(**as_dict(client_module)))
        entries = index["models"] if client_module.protocol == "grpc" else index
        return {entry["name"]: entry["state"] for entry in entries}

    await maybe_await(client.unload_model("repeat"))
    assert (await states())["repeat"] == "UNAVAILABLE"
    await maybe_await(client.load_model("repeat"))
    assert (await states())["repeat"] == "READY"
    await maybe_await(client.load_model("double", config='{"backend": "python", "max_batch_size": 4}'))
    config = await maybe_await(client.get_model_config("double", **as_dict(client_module)))
    assert config.get("config", config)["max_batch_size"] == 4
    await maybe_await(client.unload_model("double"))  # a load alone would keep the configuration
    await maybe_await(client.load_model("double"))
    name = f"uploaded_{client_module.name.replace('.', '_')}"
    files = {"file:1/model.py": REPEAT.encode()}
    config = '{"backend": "python", "max_batch_size": 0}'
    await maybe_await(client.load_model(name, config=config, files=files))
    assert await maybe_await(client.is_model_ready(name))
    await maybe_await(client.unload_model(name, unload_dependents=True))
    assert not await maybe_await(client.is_model_ready(name))
    with pytest.raises(InferenceServerException, match="failed to load 'nobody'"):
        await maybe_await(client.load_model("nobody"))


async def infer_with_everything(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    y = client_module.make("InferRequestedOutput", "Y", class_count=2)
    t = client_module.make("InferRequestedOutput", "T")
    assert y.name() == "Y"
    codings = {"compression_algorithm": "gzip"}
    if client_module.protocol == "http":
        codings = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "deflate"}
    result = await maybe_await(
        client.infer(
            "double",
            inputs(client_module),
            model_version="1",
            outputs=[y, t],
            request_id="seven",
            sequence_id=5,
            sequence_start=True,
            sequence_end=True,
            priority=1,
            timeout=10_000_000,
            headers={"x-one": "1"},
            **codings,
        )
    )
    result = RecordingResult(client_module, result)
    assert result.as_numpy("Y").tolist() == [b"6.000000:3", b"4.000000:2"]
    assert result.as_numpy("T").tolist() == S.tolist()
    assert result.as_numpy("nothing") is None
    response = result.get_response(**as_dict(client_module))
    assert (response["id"], response["model_name"], response["model_version"]) == ("seven", "double", "1")
    found = result.get_output("T")
    assert (found.datatype if client_module.protocol == "grpc" else found["datatype"]) == "BYTES"
    assert result.get_output("nothing") is None
    with pytest.raises(InferenceServerException, match=r"missing required input\(s\) \['S'\]"):
        await maybe_await(client.infer("double", [client_module.input("X", X, "FP32")]))


class RecordingResult:
    """A result whose method calls are recorded."""

    def __init__(self, client_module: ClientModule, result: Any) -> None:
        self._result, self._used = result, client_module.used["InferResult"]

    def __getattr__(self, name: str) -> Any:
        self._used.add(name)
        return getattr(self._result, name)


async def inputs_by_hand(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    x = client_module.make("InferInput", "X", [1], "FP32")
    assert (x.name(), x.datatype(), x.shape()) == ("X", "FP32", [1])
    x.set_shape([4])
    x.set_data_from_numpy(X)
    s = client_module.input("S", S, "BYTES")
    result = await maybe_await(client.infer("double", [x, s]))
    np.testing.assert_array_equal(result.as_numpy("Y"), X * 2)
    if client_module.protocol == "http":
        result = await maybe_await(client.infer("double", inputs(client_module, binary_data=False)))
        assert result.as_numpy("T").tolist() == S.tolist()
        output = client_module.make("InferRequestedOutput", "Y", binary_data=False)
        result = await maybe_await(client.infer("double", inputs(client_module), outputs=[output]))
        assert result.get_output("Y")["data"] == [0, 2, 4, 6]


async def bodies_by_hand(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    """Helpers for callers that send and receive with another HTTP client."""
    if client_module.protocol != "http":
        return
    body, header_length = client.generate_request_body(inputs(client_module))
    headers = {"Inference-Header-Content-Length": str(header_length)}
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url("/v2/models/double/infer"), data=body, headers=headers) as response,
    ):
        length = int(response.headers["Inference-Header-Content-Length"])
        result = client.parse_response_body(await response.read(), header_length=length)
    np.testing.assert_array_equal(result.as_numpy("Y"), X * 2)
    client_module.used["InferResult"].add("from_response_body")  # which parse_response_body is


async def parameters_and_headers(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    custom = {"text": "t", "number": 3, "half": 0.5, "yes": True}
    seen = await parameters_seen(client_module, client, parameters=custom, headers={"x-trace": "abc"})
    assert seen == {**custom, "x-trace": "abc"}
    for reserved in ("sequence_id", "priority", "headers", "triton_x"):
        with pytest.raises(InferenceServerException, match="reserved"):
            await parameters_seen(client_module, client, parameters={reserved: 1})


async def plugins(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    auth = tritonclient.http.auth.BasicAuth("user", "pass word")
    assert client.plugin() is None
    client.register_plugin(auth)
    assert client.plugin() is auth
    seen = await parameters_seen(client_module, client, headers={})
    assert base64.b64decode(seen["authorization"].removeprefix("Basic ")) == b"user:pass word"
    client.unregister_plugin()
    assert await parameters_seen(client_module, client, headers={}) == {}


async def shared_memory(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    key = f"/neso_surface_{client_module.name}_{os.getpid()}"
    memory = shm.create_shared_memory_region("region", key, 4096)
    try:
        assert shm.mapped_shared_memory_regions()
        shm.set_shared_memory_region(memory, [X])
        await maybe_await(client.register_system_shared_memory("region", key, 4096, offset=0))
        status = await maybe_await(client.get_system_shared_memory_status("region", **as_dict(client_module)))
        region = status["regions"]["region"] if client_module.protocol == "grpc" else status[0]
        assert (region["name"], region["key"], int(region["byte_size"])) == ("region", key, 4096)
        x = client_module.make("InferInput", "X", [4], "FP32")
        x.set_shared_memory("region", X.nbytes)
        y = client_module.make("InferRequestedOutput", "Y")
        y.set_shared_memory("region", X.nbytes, offset=1024)
        for _ in range(2):
            result = await maybe_await(
                client.infer("double", [x, client_module.input("S", S, "BYTES")], outputs=[y])
            )
        assert result.get_output("Y") is not None  # with its place in the region, without data
        np.testing.assert_array_equal(shm.get_contents_as_numpy(memory, np.float32, [4], 1024), X * 2)
        y.unset_shared_memory()
        result = await maybe_await(
            client.infer("double", [x, client_module.input("S", S, "BYTES")], outputs=[y])
        )
        np.testing.assert_array_equal(result.as_numpy("Y"), X * 2)
        await maybe_await(client.unregister_system_shared_memory("region"))
        status = await maybe_await(client.get_system_shared_memory_status(**as_dict(client_module)))
        assert not (status.get("regions") if client_module.protocol == "grpc" else status)
    finally:
        await maybe_await(client.unregister_system_shared_memory())
        shm.destroy_shared_memory_region(memory)


async def cuda_shared_memory(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    """Without a GPU: no regions, and a clear error. With a GPU: an invalid handle."""
    status = await maybe_await(client.get_cuda_shared_memory_status(**as_dict(client_module)))
    assert not (status.get("regions") if client_module.protocol == "grpc" else status)
    handle = base64.b64encode(bytes(64))
    with pytest.raises(
        InferenceServerException, match="failed to register CUDA shared memory region: 'mine'"
    ):
        await maybe_await(client.register_cuda_shared_memory("mine", handle, 0, 64))
    await maybe_await(client.unregister_cuda_shared_memory("mine"))
    await maybe_await(client.unregister_cuda_shared_memory())
    with pytest.raises(InferenceServerException, match="cuda shared memory region: 'mine'"):
        await maybe_await(client.get_cuda_shared_memory_status("mine"))


async def asynchronous_requests(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    if client_module.asynchronous:
        replies = await asyncio.gather(*(client.infer("double", inputs(client_module)) for _ in range(8)))
    elif client_module.protocol == "http":
        pending = [client.async_infer("double", inputs(client_module)) for _ in range(8)]
        replies = [request.get_result(block=True, timeout=60) for request in pending]
    else:
        answers: queue.Queue[Any] = queue.Queue()
        for _ in range(8):
            client.async_infer(
                "double", inputs(client_module), lambda result, error: answers.put(error or result)
            )
        replies = [answers.get(timeout=60) for _ in range(8)]
    for reply in replies:
        np.testing.assert_array_equal(reply.as_numpy("Y"), X * 2)


async def cancelling_one(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    """Return the call context of an asynchronous gRPC request."""
    slow = [client_module.input("X", X + 5, "FP32"), client_module.input("S", S, "BYTES")]
    if client_module.name == "grpc":
        answers: queue.Queue[Any] = queue.Queue()
        context = client.async_infer("double", slow, lambda result, error: answers.put((result, error)))
        context.cancel()
        _, error = answers.get(timeout=60)
        assert error.status() == "StatusCode.CANCELLED"
    elif client_module.name == "grpc.aio":
        task = asyncio.ensure_future(client.infer("double", slow))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def timeouts(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    slow = [client_module.input("X", X + 5, "FP32"), client_module.input("S", S, "BYTES")]
    if client_module.protocol == "grpc":
        with pytest.raises(InferenceServerException) as caught:
            await maybe_await(client.infer("double", slow, client_timeout=0.2))
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        assert await maybe_await(client.is_server_live(client_timeout=10))
        return
    options = {"conn_timeout": 0.3} if client_module.asynchronous else {"network_timeout": 0.3}
    impatient = client_module.connect(server, **options)
    with pytest.raises(Exception, match=r"(?i)timed? ?out|^$"):
        await maybe_await(impatient.infer("double", slow))
    await maybe_await(impatient.close())


async def streams(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    counts = {"a": 3, "b": 0, "c": 5}

    def arguments(name: str) -> dict[str, Any]:
        tensor = client_module.input("COUNT", np.array([counts[name]], np.int32), "INT32")
        return {
            "model_name": "repeat",
            "inputs": [tensor],
            "request_id": name,
        }

    found: dict[str, list[int]] = {name: [] for name in counts}
    ended: set[str] = set()

    def take(result: Any, error: Any) -> None:
        assert error is None, error
        response = result.get_response()
        if response.outputs:
            found[response.id].append(int(result.as_numpy("OUT")[0]))
        if response.parameters["triton_final_response"].bool_param:
            ended.add(response.id)

    if client_module.name == "grpc":
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        for name in counts:
            client.async_stream_infer(**arguments(name), enable_empty_final_response=True)
        while len(ended) < len(counts):
            take(*answers.get(timeout=60))
        client.stop_stream()
        assert ended == set(counts)
    elif client_module.name == "grpc.aio":

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for name in counts:
                yield arguments(name)

        async for result, error in client.stream_infer(requests()):
            take(result, error)
    else:
        return
    assert found == {name: list(range(count)) for name, count in counts.items()}


async def cancelling_streams(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    slow = {
        "model_name": "double",
        "inputs": [client_module.input("X", X + 30, "FP32"), inputs(client_module)[1]],
    }
    if client_module.name == "grpc":
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer(**{**slow, "inputs": inputs(client_module)})
        assert answers.get(timeout=60) is None
        client.async_stream_infer(**{**slow, "model_name": "nobody"})
        assert "nobody" in str(answers.get(timeout=60))
        client.stop_stream(cancel_requests=True)
    elif client_module.name == "grpc.aio":
        more = asyncio.Event()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {**slow, "inputs": inputs(client_module)}
            await more.wait()

        responses = client.stream_infer(requests())
        async for _, error in responses:
            assert error is None
            responses.cancel()
            break
        more.set()


def plain(settings: Any) -> dict[str, Any]:
    """Return log or trace settings as plain values, from JSON or a message."""
    if isinstance(settings, dict):
        return settings
    return MessageToDict(settings, preserving_proto_field_name=True)["settings"]


async def changing_settings(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    before = plain(await maybe_await(client.get_log_settings()))
    assert "log_verbose_level" in before
    changed = plain(await maybe_await(client.update_log_settings({"log_verbose_level": 1})))
    assert "1" in str(changed["log_verbose_level"])
    await maybe_await(client.update_log_settings({"log_verbose_level": 0}))
    everywhere = plain(await maybe_await(client.get_trace_settings()))
    assert "OFF" in str(everywhere["trace_level"])
    updated = plain(await maybe_await(client.update_trace_settings("double", {"trace_rate": "7"})))
    assert "7" in str(updated["trace_rate"])
    assert "7" not in str(plain(await maybe_await(client.get_trace_settings()))["trace_rate"])
    cleared = plain(await maybe_await(client.update_trace_settings("double", {"trace_rate": None})))
    assert cleared["trace_rate"] == everywhere["trace_rate"]
    with pytest.raises(InferenceServerException, match="unknown model"):
        await maybe_await(client.get_trace_settings("nobody"))


async def closing(client_module: ClientModule, client: Any, server: ServerProcess) -> None:
    other = client_module.connect(server)
    assert await maybe_await(other.is_server_live())
    await maybe_await(other.close())


Scenario = Callable[[ClientModule, Any, ServerProcess], Awaitable[None]]
SCENARIOS: tuple[Scenario, ...] = (
    health_and_metadata,
    statistics,
    repository_control,
    infer_with_everything,
    inputs_by_hand,
    bodies_by_hand,
    parameters_and_headers,
    plugins,
    shared_memory,
    cuda_shared_memory,
    asynchronous_requests,
    cancelling_one,
    timeouts,
    streams,
    cancelling_streams,
    changing_settings,
    closing,
)
done: set[tuple[str, Scenario]] = set()


async def run(scenario: Scenario, client_module: ClientModule, server: ServerProcess) -> None:
    options = {"concurrency": 8} if client_module.name == "http" else {}
    client = client_module.connect(server, **options)
    try:
        await scenario(client_module, client, server)
    finally:
        await maybe_await(client.close())
    done.add((client_module.name, scenario))


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
async def test_scenario(scenario: Scenario, client_module: ClientModule, server: ServerProcess) -> None:
    await run(scenario, client_module, server)


async def test_every_method_is_exercised(client_module: ClientModule, server: ServerProcess) -> None:
    for scenario in SCENARIOS:
        if (client_module.name, scenario) not in done:  # when this test runs alone
            await run(scenario, client_module, server)
    missing = {name: client_module.missing(name) for name in CLASSES}
    assert missing == {
        "InferenceServerClient": set(),
        "InferInput": set(),
        "InferRequestedOutput": set(),
        "InferResult": set(),
    }
    assert "Traceback" not in server.output
