"""Python model processes in a real server: crashes under load, a killed server, environments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from eventually import wait_until
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException

TENSORS = """
backend: "python"
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
"""
PROCESS = 'parameters { key: "EXECUTION_MODE" value { string_value: "process" } }\n'
DOUBLE = """
import ctypes
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            if array[0] < 0:
                ctypes.string_at(0)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array * 2)]))
        return responses
"""
STUCK = """
import ctypes
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        # Holds the GIL: no thread of this process can notice anything.
        ctypes.PyDLL(None).sleep(600)
"""
LARGE = 1 << 20


def add(repository: Path, name: str, code: str = DOUBLE, config: str = PROCESS) -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(TENSORS + config)
    (folder / "1" / "model.py").write_text(code)
    return folder


def infer(client: http_client.InferenceServerClient, model: str, array: np.ndarray) -> np.ndarray:
    given = http_client.InferInput("IN", list(array.shape), "FP32")
    given.set_data_from_numpy(array)
    return client.infer(model, [given]).as_numpy("OUT")


def assert_memory_is_anonymous(server: psutil.Process) -> None:
    """Check that no memory has a name in /dev/shm, where a killed process would leave it."""
    maps = [Path(f"/proc/{process.pid}/maps").read_text() for process in (server, *server.children())]
    assert "memfd:neso_python_backend" in maps[0]
    assert not any("/dev/shm/" in text for text in maps)


class Load(threading.Thread):
    """A client that sends requests repeatedly, counts the results and checks each response."""

    def __init__(self, server: ServerProcess, model: str, size: int) -> None:
        super().__init__()
        self.outcomes: Counter[str] = Counter()
        self.stop = threading.Event()
        self._server, self._model, self._size = server, model, size
        self.start()

    def run(self) -> None:
        with http_client.InferenceServerClient(self._server.address("http"), network_timeout=60) as client:
            number = 0
            while not self.stop.is_set():
                number += 1
                array = np.full(self._size, number, np.float32)
                try:
                    right = np.array_equal(infer(client, self._model, array), array * 2)
                    self.outcomes["right" if right else "wrong"] += 1
                except InferenceServerException as error:
                    self.outcomes["died" if "is not healthy" in str(error) else str(error)] += 1

    def end(self) -> Counter[str]:
        self.stop.set()
        self.join(60)
        return self.outcomes


def test_crashes_under_load_affect_only_their_model(tmp_path):
    add(tmp_path, "fragile", config=PROCESS + "instance_group { count: 2 }")
    add(tmp_path, "process")
    add(tmp_path, "thread", config="")
    with ServerProcess("--model-repository", tmp_path) as server:
        process = psutil.Process(server.process.pid)
        loads = {
            (model, size): Load(server, model, size)
            for model in ("fragile", "process", "thread")
            for size in (4, LARGE)
        }
        with http_client.InferenceServerClient(server.address("http")) as client:
            for _ in range(4):
                time.sleep(0.1)
                with pytest.raises(InferenceServerException, match="SIGSEGV"):
                    infer(client, "fragile", np.array([-1], np.float32))
            wait_until(lambda: all(load.outcomes["right"] > 10 for load in loads.values()))
            wait_until(lambda: client.is_model_ready("fragile"))
        outcomes = {key: load.end() for key, load in loads.items()}
        for (model, size), outcome in outcomes.items():
            if model != "fragile":
                assert set(outcome) == {"right"}, (model, size, outcome)
        died = sum((outcomes["fragile", size] for size in (4, LARGE)), Counter())
        assert set(died) <= {"right", "died"} and died["died"] <= 4 * 2, died
        wait_until(lambda: len(process.children()) == 3)
        assert server.get("/v2/health/ready")[0] == 200
        children = process.children()
        assert_memory_is_anonymous(process)
        assert server.stop() == 0
    assert not any(child.is_running() for child in children)


def test_processes_end_when_the_server_is_killed(tmp_path):
    add(tmp_path, "process", config=PROCESS + "instance_group { count: 2 }")
    add(tmp_path, "stuck", STUCK)
    with ServerProcess("--model-repository", tmp_path) as server:
        children = psutil.Process(server.process.pid).children()
        assert len(children) == 3
        with http_client.InferenceServerClient(server.address("http")) as client:
            infer(client, "process", np.ones(LARGE, np.float32))
            given = http_client.InferInput("IN", [1], "FP32")
            given.set_data_from_numpy(np.ones(1, np.float32))
            client.async_infer("stuck", [given])
            assert_memory_is_anonymous(psutil.Process(server.process.pid))
            os.kill(server.process.pid, signal.SIGKILL)
            _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


WHO = """
import json, sys
import numpy as np
import triton_python_backend_utils as pb_utils
import only_here

def found(name):
    try:
        __import__(name)
        return True
    except ImportError:
        return False

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "ANY", "data_type": "TYPE_FP32", "dims": [1], "optional": True})
        config.add_output({"name": "WHO", "data_type": "TYPE_STRING", "dims": [1]})
        return config

    def execute(self, requests):
        told = {"prefix": sys.prefix, "path": sys.path, "secret": only_here.SECRET,
                "modules": sorted({name.partition(".")[0] for name in sys.modules}),
                "msgspec": found("msgspec"), "grpc": found("grpc")}
        text = np.array([json.dumps(told)], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("WHO", text)]) for _ in requests]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with numpy and one module, without the server's packages."""
    folder = tmp_path_factory.mktemp("environments") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    installed = Path(np.__file__).parents[1]
    for package in ("numpy", "numpy.libs"):
        if (installed / package).is_dir():
            (site / package).symlink_to(installed / package)
    (site / "only_here.py").write_text("SECRET = 42")
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_model_in_a_separate_environment(tmp_path, environment, packed):
    folder = tmp_path / "models" / "who"
    (folder / "1").mkdir(parents=True)
    if packed:
        with tarfile.open(folder / "environment.tar.gz", "w:gz") as archive:
            archive.add(environment, ".")
        path = "$$TRITON_MODEL_DIRECTORY/environment.tar.gz"
    else:
        path = str(environment)
    (folder / "config.pbtxt").write_text(
        f'backend: "python" instance_group {{ count: 2 }}\n'
        f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
    )
    (folder / "1" / "model.py").write_text(WHO)
    unpacked = None
    with ServerProcess("--model-repository", tmp_path / "models") as server:
        assert server.ports, server.output
        with http_client.InferenceServerClient(server.address("http")) as client:
            reported = json.loads(client.infer("who", []).as_numpy("WHO")[0])
        assert reported["secret"] == 42
        assert not reported["msgspec"] and not reported["grpc"], "packages of the server are visible"
        assert not {"grpc", "tritonclient", "prometheus_client", "fastapi", "zmq"} & set(reported["modules"])
        assert not any("neso" in Path(entry).parts for entry in reported["path"])
        if packed:
            unpacked = Path(reported["prefix"])
            assert "neso-environment-" in reported["prefix"]
        else:
            assert Path(reported["prefix"]) == environment
    assert unpacked is None or not unpacked.exists()


@pytest.mark.parametrize(
    ("path", "reason"),
    [("/no/such/place", "does not exist"), ("$$TRITON_MODEL_DIRECTORY", "contains no environment")],
)
def test_invalid_environment_is_reported(tmp_path, path, reason):
    config = f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
    add(tmp_path, "model", config=config)
    with ServerProcess("--model-repository", tmp_path, "--exit-on-error=false") as server:
        status, index = server.post("/v2/repository/index", {})
        assert status == 200 and reason in index[0]["reason"]


MOODY = """
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def is_ready(self):
        return (Path(pb_utils.get_model_dir()) / "yes").exists()

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""


@pytest.mark.parametrize("config", ["", PROCESS], ids=["thread", "process"])
def test_model_readiness(tmp_path, config):
    folder = add(tmp_path, "moody", MOODY, config)
    with (
        ServerProcess("--model-repository", tmp_path) as server,
        http_client.InferenceServerClient(server.address("http")) as http,
        grpc_client.InferenceServerClient(server.address("grpc")) as grpc,
    ):
        assert not http.is_model_ready("moody") and not grpc.is_model_ready("moody")
        status, body = server.get("/v2/models/moody/versions/1/ready")
        assert (status, json.loads(body)["error"]) == (400, "Model version not ready")
        assert http.is_server_ready() and grpc.is_server_ready()
        assert infer(http, "moody", np.ones(2, np.float32)).tolist() == [1, 1]
        (folder / "1" / "yes").touch()
        assert http.is_model_ready("moody") and grpc.is_model_ready("moody", "1")
