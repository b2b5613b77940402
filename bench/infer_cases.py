"""Models and requests of kserve_infer.py, and their load generators."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from tritonclient.grpc import service_pb2

ELEMENTS = 16
LARGE_ELEMENTS = 4 << 20
REGIONS = ("bench_input", "bench_output")

IDENTITY = """
backend: "python"
max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
dynamic_batching { }
instance_group { count: 1 kind: KIND_CPU }
"""
LARGE = """
backend: "python"
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { count: 1 kind: KIND_CPU }
"""
MODEL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
            output = pb_utils.Tensor("OUTPUT0", tensor.as_numpy())
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
"""
STEP = """
  step {
    model_name: "identity"
    model_version: -1
    input_map { key: "INPUT0" value: "%s" }
    output_map { key: "OUTPUT0" value: "%s" }
  }
"""
STEPS = "".join(STEP % ends for ends in (("INPUT0", "first"), ("first", "second"), ("second", "OUTPUT0")))
ENSEMBLE = f"""
platform: "ensemble"
max_batch_size: 64
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
ensemble_scheduling {{ {STEPS} }}
"""


def write_repository(root: Path, *, processes: bool = False) -> None:
    """Write the model repository. `processes`: Neso runs the models in processes, like Triton."""
    mode = 'parameters { key: "EXECUTION_MODE" value { string_value: "process" } }' if processes else ""
    for name, config in (("identity", IDENTITY + mode), ("large", LARGE + mode), ("ensemble", ENSEMBLE)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        if name != "ensemble":
            (root / name / "1" / "model.py").write_text(MODEL)


@dataclass(frozen=True)
class Load:
    """Requests per second, and percentiles of latency in ms."""

    rate: float
    p50: float
    p99: float


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int


@dataclass(frozen=True)
class HttpCase:
    """Requests to one model, sent by wrk."""

    model: str
    headers: dict[str, str]
    body: bytes

    def run(self, ports: Ports, connections: int, seconds: float) -> Load:
        """Run the load. Raises `RuntimeError` if any response is an error."""
        with tempfile.TemporaryDirectory() as folder:
            body, script = Path(folder) / "body", Path(folder) / "post.lua"
            body.write_bytes(self.body)
            headers = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in self.headers.items())
            script.write_text(
                f'wrk.method = "POST"\nwrk.body = io.open("{body}", "rb"):read("*a")\n{headers}'
            )
            url = f"http://127.0.0.1:{ports.http}/v2/models/{self.model}/infer"
            command = ["wrk", "--latency", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "-s", script, url]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if "Non-2xx" in text:
            raise RuntimeError(text)
        rate = float(_find(r"Requests/sec:\s+([\d.]+)", text)[1])
        return Load(rate, _milliseconds("50%", text), _milliseconds("99%", text))


@dataclass(frozen=True)
class GrpcCase:
    """Unary calls, sent by h2load."""

    message: bytes

    def run(self, ports: Ports, connections: int, seconds: float) -> Load:
        """Run the load. Raises `RuntimeError` if any call fails."""
        with tempfile.TemporaryDirectory() as folder:
            data, log = Path(folder) / "message", Path(folder) / "log"
            data.write_bytes(b"\0" + len(self.message).to_bytes(4, "big") + self.message)
            url = f"http://127.0.0.1:{ports.grpc}/inference.GRPCInferenceService/ModelInfer"
            command = ["h2load", "-t1", f"-c{connections}", "-m1", f"-D{seconds:.0f}", "-w30", "-W30"]
            command += [f"-d{data}", f"--log-file={log}"]
            command += ["-H", "content-type: application/grpc", "-H", "te: trailers", url]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows = np.loadtxt(log, dtype=np.int64, ndmin=2)
        if "0 failed" not in text or not len(rows):
            raise RuntimeError(text)
        p50, p99 = np.percentile(rows[:, 2], (50, 99)) / 1000
        return Load(len(rows) / seconds, float(p50), float(p99))


Case = HttpCase | GrpcCase


def make_cases() -> dict[str, Case]:
    """All cases by name."""
    values = (np.arange(ELEMENTS, dtype=np.float32) / 7)[np.newaxis]
    large = np.zeros(LARGE_ELEMENTS, np.float32)
    return {
        "json": json_case("identity", values),
        "binary": binary_case("identity", values),
        "grpc": grpc_case("identity", values),
        "ensemble": json_case("ensemble", values),
        "16MB-http": binary_case("large", large),
        "16MB-grpc": grpc_case("large", large),
        "16MB-shm": shared_memory_case("large", large),
    }


def describe(values: npt.NDArray[np.float32], **parameters: object) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": "INPUT0", "shape": list(values.shape), "datatype": "FP32"}
    return {**tensor, "parameters": parameters} if parameters else tensor


def json_case(model: str, values: npt.NDArray[np.float32]) -> HttpCase:
    body = {"inputs": [{**describe(values), "data": values.ravel().tolist()}]}
    return HttpCase(model, {"Content-Type": "application/json"}, orjson.dumps(body))


def binary_case(model: str, values: npt.NDArray[np.float32]) -> HttpCase:
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}]
    header = orjson.dumps({"inputs": [describe(values, binary_data_size=values.nbytes)], "outputs": outputs})
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(header)),
    }
    return HttpCase(model, headers, header + values.tobytes())


def grpc_case(model: str, values: npt.NDArray[np.float32]) -> GrpcCase:
    message = service_pb2.ModelInferRequest(
        model_name=model,
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": values.shape}],
        raw_input_contents=[values.tobytes()],
    )
    return GrpcCase(message.SerializeToString())


def shared_memory_case(model: str, values: npt.NDArray[np.float32]) -> HttpCase:
    source, target = (
        {"shared_memory_region": name, "shared_memory_byte_size": values.nbytes} for name in REGIONS
    )
    body = {
        "inputs": [describe(values, **source)],
        "outputs": [{"name": "OUTPUT0", "parameters": target}],
    }
    return HttpCase(model, {"Content-Type": "application/json"}, orjson.dumps(body))


@contextmanager
def shared_memory(servers: list[Ports]) -> Iterator[None]:
    """Create the regions of `shared_memory_case` and register them with the servers."""
    size = 4 * LARGE_ELEMENTS
    made = [SharedMemory(name, create=True, size=size) for name in REGIONS]
    try:
        for ports in servers:
            for name in REGIONS:
                url = f"http://127.0.0.1:{ports.http}/v2/systemsharedmemory/region/{name}/register"
                body = json.dumps({"key": f"/{name}", "offset": 0, "byte_size": size}).encode()
                urllib.request.urlopen(urllib.request.Request(url, body)).close()
        yield
    finally:
        for region in made:
            region.close()
            region.unlink()


def _find(pattern: str, text: str) -> re.Match[str]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(text)
    return found


def _milliseconds(percentile: str, text: str) -> float:
    found = _find(rf"{percentile}\s+([\d.]+)(us|ms|s)", text)
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]
