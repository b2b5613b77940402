"""System shared memory with `tritonclient`'s utilities, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
import tritonclient.utils.shared_memory as shm
from eventually import until
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

SIZE = 8192
MODEL = """
import time
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
        s = pb_utils.get_input_tensor_by_name(request, "S").as_numpy()
        folder = Path(pb_utils.get_model_dir())
        end = time.monotonic() + float(x[0])  # seconds; less when the file `go` is there, or it is cancelled
        while time.monotonic() < end and not (folder / "go").exists() and not request.is_cancelled():
            (folder / "begun").touch()
            time.sleep(0.005)
        return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x * 2), pb_utils.Tensor("T", s)])
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
input { name: "S" data_type: TYPE_STRING dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "T" data_type: TYPE_STRING dims: [ -1 ] }
"""
NUMBERS = np.arange(4, dtype=np.float32)
STRINGS = np.array([b"one", b"", "drei §".encode()], np.object_)
STRINGS_SIZE = 3 * 4 + 3 + 7


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    (path / "double" / "1").mkdir(parents=True)
    (path / "double" / "1" / "model.py").write_text(MODEL)
    (path / "double" / "config.pbtxt").write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def process(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(f"--model-repository={repository}", "--allow-client-shm=true") as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def module(protocol: str) -> ModuleType:
    return http_client if protocol == "http" else grpc_client


@pytest.fixture
def triton(module: ModuleType, protocol: str, process: ServerProcess) -> Iterator[Any]:
    with module.InferenceServerClient(process.address(protocol)) as client:
        yield client
        client.unregister_system_shared_memory()


@pytest.fixture
def memory(protocol: str) -> Iterator[Any]:
    """A region with numbers at 0, strings at 1024, and space for outputs from 4096."""
    handle = shm.create_shared_memory_region("region", f"/neso_{protocol}_{os.getpid()}", SIZE)
    shm.set_shared_memory_region(handle, [NUMBERS])
    shm.set_shared_memory_region(handle, [serialize_byte_tensor(STRINGS)], offset=1024)
    yield handle
    shm.destroy_shared_memory_region(handle)


def key(memory: Any) -> str:
    return str(memory._shm_key)


def region_inputs(module: Any, name: str = "region") -> list[Any]:
    inputs = [module.InferInput("X", [4], "FP32"), module.InferInput("S", [3], "BYTES")]
    inputs[0].set_shared_memory(name, NUMBERS.nbytes)
    inputs[1].set_shared_memory(name, STRINGS_SIZE, offset=1024)
    return inputs


def plain_inputs(module: Any) -> list[Any]:
    inputs = [module.InferInput("X", [4], "FP32"), module.InferInput("S", [3], "BYTES")]
    inputs[0].set_data_from_numpy(NUMBERS)
    inputs[1].set_data_from_numpy(STRINGS)
    return inputs


def region_outputs(module: Any, size: int = 512) -> list[Any]:
    outputs = [module.InferRequestedOutput("Y"), module.InferRequestedOutput("T")]
    outputs[0].set_shared_memory("region", size, offset=4096)
    outputs[1].set_shared_memory("region", size, offset=6000)
    return outputs


def check_outputs(memory: Any, result: Any) -> None:
    assert shm.get_contents_as_numpy(memory, np.float32, [4], 4096).tolist() == [0, 2, 4, 6]
    assert shm.get_contents_as_numpy(memory, np.object_, [3], 6000).tolist() == STRINGS.tolist()
    check_parameters(result)


def check_parameters(result: Any) -> None:
    outputs = [result.get_output(name) for name in ("Y", "T")]
    if isinstance(outputs[0], dict):  # HTTP: like Triton's, without parameters
        assert [output.keys() for output in outputs] == [{"name", "datatype", "shape"}] * 2
        return
    assert [parameters_of(output) for output in outputs] == [
        {"shared_memory_region": "region", "shared_memory_offset": 4096, "shared_memory_byte_size": 16},
        {
            "shared_memory_region": "region",
            "shared_memory_offset": 6000,
            "shared_memory_byte_size": STRINGS_SIZE,
        },
    ]


def parameters_of(output: Any) -> dict[str, Any]:
    return {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in output.parameters.items()
    }


def status_of(client: Any, name: str = "") -> list[dict[str, Any]]:
    """Return the status in the format of HTTP."""
    status = client.get_system_shared_memory_status(name)
    if isinstance(status, list):
        return status
    return [
        {"name": name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
        for name, each in status.regions.items()
    ]


@contextmanager
def refused(protocol: str, message: str, http: str, grpc: str) -> Iterator[None]:
    with pytest.raises(InferenceServerException, match=message) as caught:
        yield
    assert caught.value.status() == (http if protocol == "http" else f"StatusCode.{grpc}")


def test_register_status_unregister(triton, memory, process):
    assert status_of(triton) == []
    triton.register_system_shared_memory("region", key(memory), SIZE)
    triton.register_system_shared_memory("part 1", key(memory), 16, offset=1024)
    region = {"name": "region", "key": key(memory), "offset": 0, "byte_size": SIZE}
    part = {"name": "part 1", "key": key(memory), "offset": 1024, "byte_size": 16}
    assert sorted(status_of(triton), key=lambda each: each["name"]) == [part, region]
    assert status_of(triton, "region") == [region]
    triton.unregister_system_shared_memory("region")
    triton.unregister_system_shared_memory("nothing")
    assert status_of(triton) == [part]
    triton.unregister_system_shared_memory()
    assert status_of(triton) == []
    assert key(memory) not in Path(f"/proc/{process.process.pid}/maps").read_text()


def test_inputs_and_outputs_in_shared_memory(triton, module, memory):
    triton.register_system_shared_memory("region", key(memory), SIZE)
    for _ in range(3):
        result = triton.infer("double", region_inputs(module), outputs=region_outputs(module))
        check_outputs(memory, result)
        memory._mpsm_handle.buf[4096:SIZE] = bytes(SIZE - 4096)
    triton.unregister_system_shared_memory("region")
    assert status_of(triton) == []


def test_only_inputs(triton, module, memory):
    triton.register_system_shared_memory("region", key(memory), SIZE)
    result = triton.infer("double", region_inputs(module))
    assert result.as_numpy("Y").tolist() == [0, 2, 4, 6]
    assert result.as_numpy("T").tolist() == STRINGS.tolist()


def test_mixed_shared_memory_and_inline_tensors(triton, module, memory):
    triton.register_system_shared_memory("region", key(memory), SIZE)
    inputs = [region_inputs(module)[0], plain_inputs(module)[1]]
    outputs = [region_outputs(module)[0], module.InferRequestedOutput("T")]
    result = triton.infer("double", inputs, outputs=outputs)
    assert shm.get_contents_as_numpy(memory, np.float32, [4], 4096).tolist() == [0, 2, 4, 6]
    assert result.as_numpy("T").tolist() == STRINGS.tolist()
    inputs = [plain_inputs(module)[0], region_inputs(module)[1]]
    result = triton.infer("double", inputs, outputs=[outputs[1]])
    assert result.as_numpy("T").tolist() == STRINGS.tolist() and result.as_numpy("Y") is None


def test_region_with_an_offset(triton, module, memory):
    triton.register_system_shared_memory("strings", key(memory), 64, offset=1000)
    inputs = plain_inputs(module)
    inputs[1].set_shared_memory("strings", STRINGS_SIZE, offset=24)
    assert triton.infer("double", inputs).as_numpy("T").tolist() == STRINGS.tolist()


def test_invalid_registrations(triton, protocol, memory):
    triton.register_system_shared_memory("region", key(memory), SIZE)
    exists = "shared memory region 'region' already in manager"
    with refused(protocol, exists, "400", "ALREADY_EXISTS"):
        triton.register_system_shared_memory("region", key(memory), SIZE)
    for bad in ("/neso_nothing", f"/../shm{key(memory)}", "/../../etc/passwd"):
        message = f"Unable to open shared memory region: '{bad}'"
        with refused(protocol, message, "500", "INTERNAL"):
            triton.register_system_shared_memory("bad", bad, SIZE)
    message = "failed to register shared memory region 'big': invalid args"
    with refused(protocol, message, "400", "INVALID_ARGUMENT"):
        triton.register_system_shared_memory("big", key(memory), SIZE, offset=1)
    message = "Unable to find system shared memory region: 'big'"
    with refused(protocol, message, "404", "NOT_FOUND"):
        triton.get_system_shared_memory_status("big")


def test_invalid_requests(triton, module, protocol, memory):
    message = "Unable to find shared memory region: 'region'"
    with refused(protocol, message, "404", "NOT_FOUND"):
        triton.infer("double", region_inputs(module))
    with refused(protocol, message, "404", "NOT_FOUND"):
        triton.infer("double", plain_inputs(module), outputs=region_outputs(module))
    triton.register_system_shared_memory("region", key(memory), SIZE)
    message = r"Invalid offset \+ byte size for shared memory region: 'region'"
    with refused(protocol, message, "400", "INVALID_ARGUMENT"):
        triton.infer("double", plain_inputs(module), outputs=region_outputs(module, size=SIZE))
    inputs = region_inputs(module)
    inputs[0].set_shared_memory("region", 20)
    message = "input byte size mismatch for input 'X' for model 'double'. Expected 16, got 20"
    with refused(protocol, message, "400", "INVALID_ARGUMENT"):
        triton.infer("double", inputs)
    message = (
        r"shared memory size specified with the request for output 'Y' \(8 bytes\) should be at least 16 bytes "
        "to hold the results"
    )
    with refused(protocol, message, "500", "INTERNAL"):
        triton.infer("double", plain_inputs(module), outputs=region_outputs(module, size=8))
    triton.infer("double", plain_inputs(module))


def test_inline_data_with_shared_memory_is_rejected(process):
    parameters = {"shared_memory_region": "region", "shared_memory_byte_size": 4}
    entry = {"name": "X", "datatype": "FP32", "shape": [1], "parameters": parameters, "data": [1.0]}
    status, response = process.post("/v2/models/double/infer", {"inputs": [entry]})
    assert status == 400 and "must set only one of" in response["error"]
    del entry["data"], parameters["shared_memory_byte_size"]
    status, response = process.post("/v2/models/double/infer", {"inputs": [entry]})
    assert status == 400 and "'shared_memory_byte_size' is missing" in response["error"]
    for body, words in (
        ({}, "has no 'key' field"),
        ({"key": "/k"}, "has no 'byte_size' field"),
        ({"key": 1, "byte_size": 1}, "non-string as string"),
        ({"key": "/k", "byte_size": -1}, "non-unsigned-integer"),
    ):
        status, response = process.post("/v2/systemsharedmemory/region/r/register", body)
        assert status == 400 and words in response["error"]


def test_cuda_regions_are_rejected(triton, protocol):
    status = triton.get_cuda_shared_memory_status()
    assert status == [] if protocol == "http" else not status.regions
    triton.unregister_cuda_shared_memory()
    triton.unregister_cuda_shared_memory("c")
    message = (
        "failed to register CUDA shared memory region: 'c', "  # then "GPUs not supported" or "invalid args"
    )
    with refused(protocol, message, "400", "INVALID_ARGUMENT"):
        triton.register_cuda_shared_memory("c", base64.b64encode(bytes(64)), 0, 16)


def test_the_extension_is_advertised(process):
    assert b'"system_shared_memory"' in process.get("/v2")[1]


@pytest.mark.parametrize(("protocol", "aio"), [("http", http_aio), ("grpc", grpc_aio)])
async def test_with_the_asyncio_clients(protocol, aio, process, memory):
    async with aio.InferenceServerClient(process.address(protocol)) as client:
        await client.register_system_shared_memory("region", key(memory), SIZE)
        result = await client.infer("double", region_inputs(aio), outputs=region_outputs(aio))
        check_outputs(memory, result)
        await client.unregister_system_shared_memory("region")


@pytest.mark.parametrize(("protocol", "aio"), [("http", http_aio), ("grpc", grpc_aio)])
async def test_unregistered_region_is_known_until_its_requests_end(
    protocol, aio, module, triton, process, memory, repository
):
    folder = repository / "double" / "1"
    for name in ("begun", "go"):
        (folder / name).unlink(missing_ok=True)
    numbers = np.array([60, 1, 1, 1], np.float32)
    shm.set_shared_memory_region(memory, [numbers])
    async with aio.InferenceServerClient(process.address(protocol)) as client:
        await client.register_system_shared_memory("region", key(memory), SIZE)
        await client.register_system_shared_memory("other", key(memory), SIZE)
        responses = [
            asyncio.ensure_future(client.infer("double", region_inputs(aio), outputs=region_outputs(aio)))
        ]
        await until((folder / "begun").exists)
        await client.unregister_system_shared_memory()
        assert [region["name"] for region in status_of(triton)] == ["region"]
        message = "Unable to find shared memory region: 'other'"
        with refused(protocol, message, "404", "NOT_FOUND"):
            await client.infer("double", region_inputs(aio, "other"))
        # a request that begins now can use the region
        responses.append(
            asyncio.ensure_future(client.infer("double", region_inputs(aio), outputs=region_outputs(aio)))
        )
        await until(
            lambda: process.metrics()['nv_inference_pending_request_count{model="double",version="1"}'] == 1
        )
        (folder / "go").touch()
        for response in responses:
            check_parameters(await response)
    assert shm.get_contents_as_numpy(memory, np.float32, [4], 4096).tolist() == [120, 2, 2, 2]
    assert shm.get_contents_as_numpy(memory, np.object_, [3], 6000).tolist() == STRINGS.tolist()
    assert status_of(triton) == []
    with refused(protocol, "Unable to find shared memory region: 'region'", "404", "NOT_FOUND"):
        triton.infer("double", region_inputs(module))


def test_large_tensors(triton, module, protocol):
    count = 1 << 20
    numbers = np.arange(count, dtype=np.float32)
    large = shm.create_shared_memory_region("large", f"/neso_large_{protocol}_{os.getpid()}", 8 * count)
    try:
        shm.set_shared_memory_region(large, [numbers])
        triton.register_system_shared_memory("large", key(large), 8 * count)
        inputs = [module.InferInput("X", [count], "FP32"), plain_inputs(module)[1]]
        inputs[0].set_shared_memory("large", 4 * count)
        output = module.InferRequestedOutput("Y")
        output.set_shared_memory("large", 4 * count, offset=4 * count)
        triton.infer("double", inputs, outputs=[output])
        result = shm.get_contents_as_numpy(large, np.float32, [count], 4 * count)
        assert np.array_equal(result, numbers * 2)
        del result
    finally:
        shm.destroy_shared_memory_region(large)


@pytest.mark.parametrize("protocol", ["grpc"])
def test_on_a_stream(triton, module, memory):
    triton.register_system_shared_memory("region", key(memory), SIZE)
    answers: list[SimpleNamespace] = []
    triton.start_stream(lambda result, error: answers.append(SimpleNamespace(result=result, error=error)))
    triton.async_stream_infer("double", region_inputs(module), outputs=region_outputs(module))
    triton.async_stream_infer("double", plain_inputs(module), outputs=region_outputs(module, size=8))
    triton.stop_stream()
    good, bad = sorted(answers, key=lambda response: response.result is None)
    assert good.error is None
    check_outputs(memory, good.result)
    assert "should be at least 16 bytes" in str(bad.error)


def test_off_by_default(repository):
    with ServerProcess(f"--model-repository={repository}") as process:
        assert b"shared_memory" not in process.get("/v2")[1]
        check_all_refused("http", http_client, process)
        check_all_refused("grpc", grpc_client, process)


def check_all_refused(protocol: str, module: ModuleType, process: ServerProcess) -> None:
    message = "client shared memory is disabled; start the server with --allow-client-shm=true"
    with module.InferenceServerClient(process.address(protocol)) as client:
        for call in (
            client.get_system_shared_memory_status,
            client.unregister_system_shared_memory,
            client.get_cuda_shared_memory_status,
            client.unregister_cuda_shared_memory,
            lambda: client.register_system_shared_memory("region", "/k", 8),
            lambda: client.register_cuda_shared_memory("region", b"AAAA", 0, 8),
            lambda: client.infer("double", region_inputs(module)),
            lambda: client.infer("double", plain_inputs(module), outputs=region_outputs(module)),
        ):
            with refused(protocol, message, "501", "UNIMPLEMENTED"):
                call()
        assert client.infer("double", plain_inputs(module)).as_numpy("Y").tolist() == [0, 2, 4, 6]
