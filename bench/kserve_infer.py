"""Infer requests a second and their latency, against a real Triton serving the same model repository, in one run.

    apt-get install wrk nghttp2-client
    python bench/kserve_infer.py [--seconds 3] [--rounds 3] [--connections 1 16 64] [--cases json binary grpc ensemble]

The model is an identity, FP32[16], on the Python backend, with dynamic batching and one instance; `ensemble` sends JSON
through three of them. The load comes from wrk (HTTP) and h2load (gRPC), one thread each, every connection waiting for
one answer at a time. The servers take turns within a round. Prints the medians of the rounds, and the ratios: how many
times as many requests, and how many times as long Triton's 50th and 99th percentile of latency are.

Triton comes from the wheel of nvidia-pytriton, installed into a scratch environment, or `--triton PYTHON`.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
from peer_server import RunningServer, machine, serve
from triton_server import GRPC_PORT, HTTP_PORT, install, triton
from tritonclient.grpc import service_pb2

NESO_HTTP, NESO_GRPC = 19000, 19001
ELEMENTS = 16
CONFIG = """
backend: "python"
max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
dynamic_batching { }
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
_STEP = """
  step {
    model_name: "identity"
    model_version: -1
    input_map { key: "INPUT0" value: "%s" }
    output_map { key: "OUTPUT0" value: "%s" }
  }
"""
ENSEMBLE = (
    """
platform: "ensemble"
max_batch_size: 64
input { name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }
ensemble_scheduling {
"""
    + "".join(_STEP % ends for ends in (("INPUT0", "first"), ("first", "second"), ("second", "OUTPUT0")))
    + "}"
)


def write_repository(root: Path) -> None:
    """The models, as Triton's own examples lay them out."""
    for name, config in (("identity", CONFIG), ("ensemble", ENSEMBLE)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    (root / "identity" / "1" / "model.py").write_text(MODEL)


@dataclass(frozen=True)
class Load:
    """Requests a second, and percentiles of their latency in ms."""

    rate: float
    p50: float
    p99: float


@dataclass(frozen=True)
class HttpCase:
    """Requests to one model by wrk."""

    model: str
    headers: dict[str, str]
    body: bytes

    def run(self, ports: tuple[int, int], connections: int, seconds: float) -> Load:
        with tempfile.TemporaryDirectory() as folder:
            body, script = Path(folder) / "body", Path(folder) / "post.lua"
            body.write_bytes(self.body)
            headers = "".join(f'wrk.headers["{name}"] = "{value}"\n' for name, value in self.headers.items())
            script.write_text(
                f'wrk.method = "POST"\nwrk.body = io.open("{body}", "rb"):read("*a")\n{headers}'
            )
            url = f"http://127.0.0.1:{ports[0]}/v2/models/{self.model}/infer"
            command = [
                "wrk",
                "--latency",
                "-t1",
                f"-c{connections}",
                f"-d{seconds:.0f}s",
                "-s",
                str(script),
                url,
            ]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        if "Non-2xx" in text:
            raise SystemExit(text)
        return Load(
            _number(r"Requests/sec:\s+([\d.]+)", text), _milliseconds("50%", text), _milliseconds("99%", text)
        )


@dataclass(frozen=True)
class GrpcCase:
    """Unary calls by h2load."""

    message: bytes

    def run(self, ports: tuple[int, int], connections: int, seconds: float) -> Load:
        with tempfile.TemporaryDirectory() as folder:
            data, log = Path(folder) / "message", Path(folder) / "log"
            data.write_bytes(b"\0" + len(self.message).to_bytes(4, "big") + self.message)
            url = f"http://127.0.0.1:{ports[1]}/inference.GRPCInferenceService/ModelInfer"
            command = [
                "h2load",
                "-t1",
                f"-c{connections}",
                "-m1",
                f"-D{seconds:.0f}",
                f"-d{data}",
                f"--log-file={log}",
            ]
            command += ["-H", "content-type: application/grpc", "-H", "te: trailers", url]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            rows = np.loadtxt(log, dtype=np.int64, ndmin=2)
        if "0 failed" not in text:
            raise SystemExit(text)
        p50, p99 = np.percentile(rows[:, 2], (50, 99)) / 1000
        return Load(len(rows) / seconds, float(p50), float(p99))


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(text)
    return float(found[1])


def _milliseconds(percentile: str, text: str) -> float:
    found = re.search(rf"{percentile}\s+([\d.]+)(us|ms|s)", text)
    if found is None:
        raise SystemExit(text)
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]


def make_cases() -> dict[str, HttpCase | GrpcCase]:
    values = np.arange(ELEMENTS, dtype=np.float32) / 7
    tensor = {"name": "INPUT0", "shape": [1, ELEMENTS], "datatype": "FP32"}
    json_body = orjson.dumps({"inputs": [{**tensor, "data": values.tolist()}]})
    header = orjson.dumps(
        {
            "inputs": [{**tensor, "parameters": {"binary_data_size": values.nbytes}}],
            "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
        }
    )
    json_headers = {"Content-Type": "application/json"}
    binary_headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(header)),
    }
    message = service_pb2.ModelInferRequest(
        model_name="identity",
        inputs=[{"name": "INPUT0", "datatype": "FP32", "shape": [1, ELEMENTS]}],
        raw_input_contents=[values.tobytes()],
    )
    return {
        "json": HttpCase("identity", json_headers, json_body),
        "binary": HttpCase("identity", binary_headers, header + values.tobytes()),
        "grpc": GrpcCase(message.SerializeToString()),
        "ensemble": HttpCase("ensemble", json_headers, json_body),
    }


def neso(repository: Path) -> AbstractContextManager[RunningServer]:
    """`neso serve` on a model repository."""
    command = [sys.executable, "-m", "neso.cli", "serve", f"--model-repository={repository}"]
    command += [
        f"--http-port={NESO_HTTP}",
        f"--grpc-port={NESO_GRPC}",
        "--allow-metrics=false",
        "--allow-openai=false",
    ]
    return serve("neso", command, f"http://127.0.0.1:{NESO_HTTP}", "", probe="/v2/health/ready")


def median(loads: list[Load], of: Callable[[Load], float]) -> float:
    return statistics.median(map(of, loads))


def compare(name: str, case: HttpCase | GrpcCase, connections: int, options: argparse.Namespace) -> None:
    """One line of the report."""
    ports = {"triton": (HTTP_PORT, GRPC_PORT), "neso": (NESO_HTTP, NESO_GRPC)}
    if options.only:
        del ports["triton"]
    loads: dict[str, list[Load]] = {server: [] for server in ports}
    for server in ports:
        case.run(ports[server], connections, 1)
    for _ in range(options.rounds):
        for server in ports:
            loads[server].append(case.run(ports[server], connections, options.seconds))
    line = f"{name:9} {connections:5}"
    values = {
        server: [
            median(of, lambda load: load.rate),
            median(of, lambda load: load.p50),
            median(of, lambda load: load.p99),
        ]
        for server, of in loads.items()
    }
    for rate, p50, p99 in values.values():
        line += f"   {rate:8,.0f} {p50:7.2f} {p99:7.2f}"
    if not options.only:
        (rate, p50, p99), (our_rate, our_p50, our_p99) = values["triton"], values["neso"]
        line += f"   {our_rate / rate:5.2f}x {p50 / our_p50:5.2f}x {p99 / our_p99:5.2f}x"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    cases = make_cases()
    parser.add_argument("--cases", nargs="+", default=list(cases), choices=list(cases))
    parser.add_argument("--triton", type=Path, help="interpreter of an environment with the wheel")
    parser.add_argument("--only", action="store_true", help="measure Neso alone")
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder))
        head = "case      conns"
        head += "" if options.only else "     triton/s  p50 ms  p99 ms"
        head += "       neso/s  p50 ms  p99 ms" + ("" if options.only else "     rate    p50    p99")
        with neso(Path(folder)):
            if options.only:
                print(head)
                for name in options.cases:
                    for connections in options.connections:
                        compare(name, cases[name], connections, options)
                return
            with triton(options.triton or install(), Path(folder)):
                print(head)
                for name in options.cases:
                    for connections in options.connections:
                        compare(name, cases[name], connections, options)


if __name__ == "__main__":
    main()
