"""Models of a repository on workers, in real processes: results, lost workers, workers that join."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from eventually import wait_until
from free_port import free_port
from server_process import ServerProcess

pytestmark = pytest.mark.slow

CONFIG = """
backend: "python"
input {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }}
{extra}
"""
SCALE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", 10 * request.inputs()[0].as_numpy())])
            for request in requests
        ]
"""
HANG_ONCE = """
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = os.path.dirname(os.path.dirname(__file__))

    def execute(self, requests):
        (request,) = requests
        try:
            with open(os.path.join(self.folder, "attempts"), "x") as file:
                file.write(str(os.getpid()))
            time.sleep(600)  # until the test kills the process
        except FileExistsError:
            pass
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", 10 * request.inputs()[0].as_numpy())])]
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(request.inputs()[0].as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.float32([number]))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write_model(repository: Path, name: str, code: str, extra: str = "") -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    (folder.parent / "config.pbtxt").write_text(CONFIG.format(extra=extra))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "scale", SCALE)
    write_model(repository, "hang", HANG_ONCE)
    write_model(repository, "count", COUNT, "model_transaction_policy { decoupled: true }")
    return repository


class StageServer:
    """A server with stages, where other workers can join."""

    def __init__(self, repository: Path, directory: Path) -> None:
        self.token_file = directory / "token"
        self.token_file.write_text("a secret of the tests")
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.process = ServerProcess(
            f"--model-repository={repository}",
            *("--stage=scale=2", "--stage=hang=2", "--stage=count=1"),
            f"--stage-address={self.address}",
            f"--stage-token-file={self.token_file}",
        )
        assert self.process.ports, self.process.output

    def infer(self, model: str, values: list[float]) -> list[float]:
        tensor = {"name": "X", "datatype": "FP32", "shape": [len(values)], "data": values}
        status, body = self.process.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})
        assert status == 200, body
        data: list[float] = body["outputs"][0]["data"]
        return data

    def workers(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.process.pid).children()
        return [child for child in children if "neso.cluster.stages.worker_process" in child.cmdline()]


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageServer]:
    server = StageServer(repository, tmp_path_factory.mktemp("server"))
    with server.process:
        yield server


def test_requests_are_executed_by_workers(server: StageServer):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: server.infer("scale", [number, 2]), range(32)))
    assert results == [[10.0 * number, 20.0] for number in range(32)]
    assert len(server.workers()) == 5


def test_request_of_a_killed_worker_is_repeated_on_another_one(server: StageServer, repository: Path):
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(server.infer, "hang", [3])
        attempts = repository / "hang" / "attempts"
        wait_until(lambda: attempts.exists() and attempts.read_text())
        psutil.Process(int(attempts.read_text())).kill()
        assert result.result(60) == [30.0]
    wait_until(lambda: server.process.gauge("neso_process_restarts_total") == 1)
    wait_until(lambda: len(server.workers()) == 5)


def test_decoupled_model_streams_from_its_worker(server: StageServer):
    status, body = server.process.post("/v2/models/count/generate", {"X": [1.0]})
    assert (status, body["Y"]) == (200, 0.0)
    status, text = server.process.get("/v2/models/count/config")
    assert status == 200 and b'"decoupled":true' in text


def test_worker_of_another_host_joins_and_leaves(server: StageServer, repository: Path):
    command = [
        sys.executable,
        "-m",
        "neso.cli",
        "worker",
        "--stage=scale",
        f"--model-repository={repository}",
    ]
    command += [f"--join={server.address}", f"--token-file={server.token_file}", "--name=guest"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as guest:
        try:
            wait_until(lambda: "worker 'guest'" in server.process.output or guest.poll() is not None)
            assert guest.poll() is None, guest.stderr and guest.stderr.read()
            guest.send_signal(signal.SIGTERM)
            assert guest.wait(60) == 0
        finally:
            guest.kill()
    assert server.infer("scale", [1]) == [10.0]


def test_worker_with_another_model_is_refused(server: StageServer, tmp_path: Path):
    write_model(tmp_path, "scale", SCALE, "max_batch_size: 4")
    command = [sys.executable, "-m", "neso.cli", "worker", "--stage=scale", f"--model-repository={tmp_path}"]
    command += [f"--join={server.address}", f"--token-file={server.token_file}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert result.returncode == 1
    assert "refuses this worker: its model 'scale' has other inputs, outputs or batching" in result.stderr
