"""Models that never return: exit and unload of a real server end in bounded time, with an answer."""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))

from eventually import wait_until
from server_process import ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TENSORS = """
input { name: "IN" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 1 ] }
"""
IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
SPINNING = """
from pathlib import Path
class TritonPythonModel:
    def execute(self, requests):
        (Path(__file__).parent / "begun").touch()
        while True:
            pass
"""
STUCK_IN_INITIALIZE = """
import threading
from pathlib import Path
class TritonPythonModel:
    def execute(self, requests):
        return []

    def initialize(self, args):
        (Path(__file__).parent / "begun").touch()
        threading.Event().wait()
"""
STUCK_IN_AUTO_COMPLETE = """
import threading
from pathlib import Path
class TritonPythonModel:
    def execute(self, requests):
        return []

    @staticmethod
    def auto_complete_config(config):
        (Path(__file__).parent / "begun").touch()
        threading.Event().wait()
"""
REQUEST = {"inputs": [{"name": "IN", "shape": [1], "datatype": "FP32", "data": [1.0]}]}
MODES = ["thread", "process"]
BOUND = 20.0
"""Seconds within which the server answers or exits, with time-outs of 2 s. Without bounds it took 35 s and more."""


def write_model(repository: Path, name: str, code: str, mode: str = "thread") -> None:
    (repository / name / "1").mkdir(parents=True)
    parameter = f'parameters {{ key: "EXECUTION_MODE" value {{ string_value: "{mode}" }} }}'
    (repository / name / "config.pbtxt").write_text(f'backend: "python"\n{TENSORS}{parameter}')
    (repository / name / "1" / "model.py").write_text(code)


def serve(repository: Path, **flags: object) -> ServerProcess:
    write_model(repository, "identity", IDENTITY)
    options = {"load-model": "*", "model-control-mode": "explicit", **flags}
    return ServerProcess(
        f"--model-repository={repository}",
        "--exit-timeout-secs=2",
        "--unload-timeout-secs=2",
        *(f"--{name}={value}" for name, value in options.items()),
    )


def ask(server: ServerProcess, model: str) -> int:
    return server.post(f"/v2/models/{model}/infer", REQUEST)[0]


def start_request(server: ServerProcess, repository: Path, model: str) -> list[int]:
    """Send a request in a thread and wait until the model executes it; returns the list that gets its status."""
    statuses: list[int] = []

    def run() -> None:
        try:
            statuses.append(ask(server, model))
        except OSError:
            statuses.append(0)

    threading.Thread(target=run, daemon=True).start()
    wait_until((repository / model / "1" / "begun").exists)
    return statuses


def start_load(server: ServerProcess, repository: Path, model: str) -> None:
    """Load a model in a thread and wait until its code runs."""

    def run() -> None:
        with suppress(OSError):  # the server exits
            server.post(f"/v2/repository/models/{model}/load", {})

    threading.Thread(target=run, daemon=True).start()
    wait_until((repository / model / "1" / "begun").exists)


def timed_exit(server: ServerProcess) -> float:
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(60)
    seconds = time.monotonic() - started
    print(f"exit took {seconds:.1f} s with a time-out of 2 s")
    return seconds


@pytest.mark.parametrize("mode", MODES)
def test_server_exits_while_a_model_spins(tmp_path, mode):
    write_model(tmp_path, "spinning", SPINNING, mode)
    with serve(tmp_path) as server:
        statuses = start_request(server, tmp_path, "spinning")
        assert timed_exit(server) < BOUND
        assert server.process.returncode == 0
        wait_until(lambda: statuses)
        assert statuses[0] in (0, 503)


@pytest.mark.parametrize(
    "code", [STUCK_IN_INITIALIZE, STUCK_IN_AUTO_COMPLETE], ids=["initialize", "complete"]
)
@pytest.mark.parametrize("mode", MODES)
def test_server_exits_while_a_model_cannot_be_loaded(tmp_path, mode, code):
    with serve(tmp_path, **{"load-model": "identity"}) as server:
        write_model(tmp_path, "stuck", code, mode)
        start_load(server, tmp_path, "stuck")
        assert ask(server, "identity") == 200
        assert timed_exit(server) < BOUND


@pytest.mark.parametrize("mode", MODES)
def test_unload_of_a_spinning_model_is_answered(tmp_path, mode):
    write_model(tmp_path, "spinning", SPINNING, mode)
    with serve(tmp_path) as server:
        statuses = start_request(server, tmp_path, "spinning")
        started = time.monotonic()
        status, answer = server.post("/v2/repository/models/spinning/unload", {})
        seconds = time.monotonic() - started
        print(f"unload of a spinning model ({mode}) took {seconds:.1f} s with a time-out of 2 s")
        assert (status, answer) == (200, None) and seconds < BOUND
        wait_until(lambda: statuses)
        assert statuses == [503], "its request was answered"
        _, index = server.post("/v2/repository/index", {})
        assert {row["name"]: row["state"] for row in index} == {
            "identity": "READY",
            "spinning": "UNAVAILABLE",
        }
        assert ask(server, "identity") == 200
        (tmp_path / "spinning" / "1" / "model.py").write_text(IDENTITY)
        assert server.post("/v2/repository/models/spinning/load", {})[0] == 200
        assert ask(server, "spinning") == 200, "the model can be loaded again"


def test_unload_during_a_stuck_load_is_answered(tmp_path):
    with serve(tmp_path, **{"load-model": "identity"}) as server:
        write_model(tmp_path, "stuck", STUCK_IN_INITIALIZE)
        start_load(server, tmp_path, "stuck")
        status, answer = server.post("/v2/repository/models/stuck/unload", {})
        assert status == 503 and "still being loaded" in answer["error"]
        assert ask(server, "identity") == 200
