"""Models that share a resource in a real server: concurrent executions and their frequency."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http_client
from server_process import ServerProcess

MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Says when it was executed, in ms of the monotonic clock.'''

    def execute(self, requests):
        start = time.monotonic() * 1000
        time.sleep(0.02)
        times = np.array([start, time.monotonic() * 1000])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TIMES", times)]) for _ in requests]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "TIMES" data_type: TYPE_FP64 dims: [ 2 ] }
instance_group { count: 2 rate_limiter { resources { name: "R" count: 1 } priority: %d } }
"""


@pytest.fixture(scope="module")
def options() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "neso.cli", "serve", "--help"], capture_output=True, text=True, timeout=110
    ).stdout
    if "--rate-limit-resource" not in help_text.replace("\n", ""):
        pytest.skip("this `neso serve` has no --rate-limit-resource")


def write(repository: Path, **priorities: int) -> None:
    for name, priority in priorities.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(CONFIG % priority)
        (repository / name / "1" / "model.py").write_text(MODEL)


def send_request(server: ServerProcess, name: str) -> tuple[float, float]:
    tensor = http_client.InferInput("IN", [1], "FP32").set_data_from_numpy(np.ones(1, np.float32))
    with http_client.InferenceServerClient(server.address("http")) as client:
        start, end = client.infer(name, [tensor]).as_numpy("TIMES")
    return start, end


@pytest.mark.usefixtures("options")
@pytest.mark.parametrize(("amount", "most"), [(1, 1), (3, 3)])
def test_concurrent_executions_are_limited_by_resources(tmp_path: Path, amount: int, most: int) -> None:
    write(tmp_path, first=1, second=1)
    arguments = ("--rate-limit=execution_count", f"--rate-limit-resource=R:{amount}")
    with ServerProcess("--model-repository", tmp_path, *arguments) as server, ThreadPoolExecutor(8) as pool:
        seen = 0
        for _ in range(20):  # slow requests do not overlap
            spans = list(
                pool.map(lambda number: send_request(server, ("first", "second")[number % 2]), range(24))
            )
            overlaps = [sum(start < moment < end for start, end in spans) for moment, _ in spans]
            seen = max(seen, max(overlaps) + 1)
            if seen >= most:
                break
    assert seen == most


@pytest.mark.usefixtures("options")
def test_priority_2_gets_half_the_executions(tmp_path: Path) -> None:
    write(tmp_path, often=1, seldom=2)
    counts = {}
    with (
        ServerProcess("--model-repository", tmp_path, "--rate-limit=execution_count") as server,
        ThreadPoolExecutor(8) as pool,
    ):
        end = time.monotonic() + 2

        def send_repeatedly(name: str) -> int:
            requested = 0
            while time.monotonic() < end:
                send_request(server, name)
                requested += 1
            return requested

        futures = {
            name: [pool.submit(send_repeatedly, name) for _ in range(4)] for name in ("often", "seldom")
        }
        counts = {name: sum(future.result() for future in of) for name, of in futures.items()}
    assert counts["often"] / counts["seldom"] == pytest.approx(2, rel=0.3)


@pytest.mark.usefixtures("options")
def test_insufficient_resource(tmp_path: Path) -> None:
    write(tmp_path, model=1)
    arguments = ("--rate-limit=execution_count", "--rate-limit-resource=R:0:0")
    with ServerProcess("--model-repository", tmp_path, *arguments) as server:
        status, index = server.post("/v2/repository/index", {})
    assert status == 200
    assert 'Resource count for "R" is limited to 0' in index[0]["reason"]
