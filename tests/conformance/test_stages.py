"""Models of a repository on workers, in real processes: results, lost workers, workers that join."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from eventually import wait_until
from free_port import free_port
from server_process import ServerProcess

import neso

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


WIDEN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.repeat(a, 50_000))]) for a in arrays]
"""
SUM = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.float32([a.sum(), a[0]]))]) for a in arrays]
"""
ENSEMBLE = """
platform: "ensemble"
input {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }}
output {{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }}
ensemble_scheduling {{
{steps}
}}
"""


def write_ensemble(repository: Path, name: str, *models: str) -> None:
    """Write an ensemble whose steps are `models`, one after the other."""
    tensors = ["X", *(f"between{number}" for number in range(1, len(models))), "Y"]
    steps = [
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "X" value: "{before}" }} '
        f'output_map {{ key: "Y" value: "{after}" }} }}'
        for model, before, after in zip(models, tensors[:-1], tensors[1:], strict=True)
    ]
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(ENSEMBLE.format(steps="\n".join(steps)))


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
    write_model(repository, "reshaped", SCALE)
    config = repository / "reshaped" / "config.pbtxt"
    config.write_text(config.read_text().replace("dims: [ -1 ]", "dims: [ 1, 4 ] reshape { shape: [ 4 ] }"))
    write_model(repository, "widen", WIDEN)
    write_model(repository, "sum", SUM)
    write_ensemble(repository, "chain", "widen", "scale", "sum")
    write_ensemble(repository, "local_end", "widen", "local")
    write_model(repository, "local", SUM)
    write_model(repository, "hang_in_chain", HANG_ONCE)
    write_ensemble(repository, "lost", "widen", "hang_in_chain", "sum")
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
            *("--stage=widen=1", "--stage=sum=1", "--stage=hang_in_chain=1"),
            "--stage=reshaped=1",
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

    def workers(self, model: str) -> list[psutil.Process]:
        children = psutil.Process(self.process.process.pid).children()
        return [child for child in children if f'{{"model":"{model}"' in child.cmdline()[-1]]

    def count(self, model: str, name: str) -> float:
        """Return a metric of a stage."""
        return self.process.metrics().get(f'neso_stage_{name}{{model="{model}",version="1"}}', 0.0)

    def lose(self, pid: int, model: str) -> None:
        """Kill a worker, and wait until the server knows."""
        lost = self.count(model, "lost_workers_total")
        psutil.Process(pid).kill()
        wait_until(lambda: self.count(model, "lost_workers_total") > lost)


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageServer]:
    server = StageServer(repository, tmp_path_factory.mktemp("server"))
    with server.process:
        yield server


def test_requests_are_executed_by_workers(server: StageServer):
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: server.infer("scale", [number, 2]), range(32)))
    assert results == [[10.0 * number, 20.0] for number in range(32)]
    assert server.count("scale", "grants_total") == 32
    assert server.count("scale", "workers") == len(server.workers("scale")) == 2


def test_classification_and_reshaped_tensors(server: StageServer):
    tensor = {"name": "X", "datatype": "FP32", "shape": [4], "data": [1, 5, 3, 2]}
    body = {"inputs": [tensor], "outputs": [{"name": "Y", "parameters": {"classification": 2}}]}
    status, answer = server.process.post("/v2/models/scale/infer", body)
    assert status == 200, answer
    assert answer["outputs"][0]["data"] == ["50.000000:1", "30.000000:2"]
    status, answer = server.process.post(
        "/v2/models/reshaped/infer", {"inputs": [{**tensor, "shape": [1, 4]}]}
    )
    assert status == 200, answer
    assert (answer["outputs"][0]["shape"], answer["outputs"][0]["data"]) == ([1, 4], [10, 50, 30, 20])


def test_request_of_a_killed_worker_is_repeated_on_another_one(server: StageServer, repository: Path):
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(server.infer, "hang", [3])
        attempts = repository / "hang" / "attempts"
        wait_until(lambda: attempts.exists() and attempts.read_text())
        server.lose(int(attempts.read_text()), "hang")
        assert result.result(60) == [30.0]
    assert server.count("hang", "retries_total") == 1
    wait_until(lambda: server.count("hang", "workers") == 2)


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


@pytest.mark.parametrize("ensemble, on_workers", [("chain", ("widen", "scale")), ("local_end", ())])
def test_ensemble_over_stages_has_the_results_of_one_process(
    server: StageServer, repository: Path, ensemble: str, on_workers: tuple[str, ...]
):
    before = {model: server.count(model, "kept_bytes_total") for model in ("widen", "scale")}
    results = [server.infer(ensemble, [number, 2]) for number in range(4)]
    kept = {model for model in before if server.count(model, "kept_bytes_total") > before[model]}
    assert kept == set(on_workers)
    with neso.Server(
        model_repository=repository, model_control_mode="explicit", startup_models=[ensemble]
    ) as one_process:
        for number, result in enumerate(results):
            (expected,) = one_process.model(ensemble).infer(inputs={"X": np.float32([number, 2])})
            assert result == expected.outputs["Y"].numpy().tolist()
    wait_until(lambda: sum(map(num_kept, server.workers("widen") + server.workers("scale"))) == 0)


def num_kept(worker: psutil.Process) -> int:
    """Return the number of tensors that a worker keeps."""
    files = Path(f"/proc/{worker.pid}/fd").iterdir()
    return sum("neso-tensor" in os.readlink(file) for file in files)


def test_ensemble_is_repeated_when_a_worker_with_an_intermediate_tensor_is_lost(
    server: StageServer, repository: Path
):
    attempts = repository / "hang_in_chain" / "attempts"
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(server.infer, "lost", [1, 2])
        wait_until(lambda: attempts.exists() and attempts.read_text())
        for worker in server.workers("widen"):
            server.lose(worker.pid, "widen")
        server.lose(int(attempts.read_text()), "hang_in_chain")
        assert result.result(90) == [50_000 * 30.0, 10.0]
    assert "a request is executed again: a worker is lost" in server.process.output
    wait_until(lambda: server.count("widen", "workers") == server.count("hang_in_chain", "workers") == 1)
