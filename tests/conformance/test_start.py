"""Server start: fast, and with a reason if it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import threading
from pathlib import Path

import pytest
from eventually import wait_until
from server_process import ServerProcess

from neso.models import SHIPPED_MODELS

PILOT = SHIPPED_MODELS["neso-pilot"]
ADD_ONE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy() + 1)
            ])
            for r in requests
        ]
"""
CONFIG = """
backend: "python"
input [{ name: "IN", data_type: TYPE_INT32, dims: [2] }]
output [{ name: "OUT", data_type: TYPE_INT32, dims: [2] }]
"""


def write_model(repository: Path, name: str, config: str, **files: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    for file, text in files.items():
        (repository / name / "1" / file.replace("__", ".")).write_text(text)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A copy of the bundled model, to be corrupted."""
    return Path(shutil.copytree(PILOT, tmp_path / "copy"))


def test_repository_with_valid_and_invalid_models(tmp_path):
    write_model(tmp_path, "add_one", CONFIG, model__py=ADD_ONE)
    write_model(tmp_path, "broken", 'backend: "python"\ninput [{ name: }]')
    write_model(tmp_path, "strange", 'backend: "warp"')
    write_model(tmp_path, "pilot", 'backend: "llm"', model__json=json.dumps({"model": str(PILOT)}))
    with ServerProcess(f"--model-repository={tmp_path}", "--strict-readiness=false") as server:
        _, index = server.post("/v2/repository/index", {})
        states = {entry["name"]: entry for entry in index}
        assert states["add_one"]["state"] == states["pilot"]["state"] == "READY"
        assert states["broken"]["state"] == "UNAVAILABLE" and "2:" in states["broken"]["reason"]
        assert states["strange"]["state"] == "UNAVAILABLE" and "warp" in states["strange"]["reason"]
        body = {"inputs": [{"name": "IN", "shape": [2], "datatype": "INT32", "data": [1, 2]}]}
        assert server.post("/v2/models/add_one/infer", body)[1]["outputs"][0]["data"] == [2, 3]
        for change, message in (
            ({"name": "NOPE"}, "NOPE"),
            ({"datatype": "FP32"}, "FP32"),
            ({"shape": [3]}, "IN"),
            ({"data": [1]}, "IN"),
        ):
            spoilt = {"inputs": [{**body["inputs"][0], **change}]}
            status, response = server.post("/v2/models/add_one/infer", spoilt)
            assert status == 400 and message in response["error"]
        assert server.post("/v2/models/pilot/generate", {"text_input": "Hi", "max_tokens": 3})[0] == 200
        status, response = server.post("/v2/models/broken/generate", {"text_input": "Hi"})
        assert status in (404, 503) and "broken" in response["error"]
        assert server.get("/v2/health/ready")[0] == 200
        assert server.stop() == 0


def test_not_ready_while_a_model_is_missing(tmp_path):
    write_model(tmp_path, "broken", "nonsense")
    with ServerProcess(f"--model-repository={tmp_path}") as server:
        assert server.get("/v2/health/live")[0] == 200
        assert server.get("/v2/health/ready")[0] == 400
    with ServerProcess(f"--model-repository={tmp_path}", "--exit-on-error=true") as server:
        assert server.process.wait(60) == 1
        assert "broken" in server.output


def test_checkpoint_is_served_by_its_name(checkpoint):
    with ServerProcess(checkpoint, f"other={checkpoint}") as server:
        for name in ("copy", "other"):
            assert server.post(f"/v2/models/{name}/generate", {"text_input": "Hi", "max_tokens": 2})[0] == 200


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _scramble(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * 100 + path.read_bytes()[100:])


def _architecture(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "architectures": ["WarpForCausalLM"], "model_type": "warp"})
    )


SPOILED = {
    "truncated": (_truncate, "model.safetensors"),
    "scrambled": (_scramble, "model.safetensors"),
    "architecture": (_architecture, "Warp"),
    "bad_config": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "no_config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json"),
}


def test_corrupted_checkpoints_are_reported_once(tmp_path):
    for name, (spoil, _) in SPOILED.items():
        spoil(Path(shutil.copytree(PILOT, tmp_path / name)))
    with ServerProcess(*(tmp_path / name for name in SPOILED)) as server:
        assert server.process.wait(60) == 1
        for name, (_, reason) in SPOILED.items():
            lines = [line for line in server.output.splitlines() if f"'{name}'" in line]
            assert [reason in line for line in lines] == [True, False], server.output
        assert "Traceback" not in server.output


@pytest.mark.parametrize("log", ["--log-error=false", "--log-file={}"])
def test_reason_that_is_not_in_the_output_as_a_log_line_is_in_the_last_line(checkpoint, tmp_path, log):
    (checkpoint / "config.json").unlink()
    with ServerProcess(checkpoint, log.format(tmp_path / "log")) as server:
        assert server.process.wait(60) == 1
        assert re.match(
            "neso: model 'copy' could not be loaded: .*config.json", server.output.splitlines()[-1]
        )


def test_unknown_model():
    with ServerProcess("no-such-org/no-such-model") as server:
        assert server.process.wait(60) == 1
        assert "no-such-org/no-such-model" in server.output
        assert "Traceback" not in server.output


@pytest.mark.parametrize("protocol", ["http", "grpc", "metrics", "openai"])
def test_port_in_use(protocol):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with ServerProcess(f"--{protocol}-port={port}") as server:
            assert server.process.wait(60) == 1
            assert f"127.0.0.1:{port}" in server.output and "in use" in server.output
            assert "Traceback" not in server.output


def test_invalid_option():
    with ServerProcess("--backend-config=nonsense") as server:
        assert server.process.wait(60) == 2
        assert "BACKEND,KEY=VALUE" in server.output


def test_a_reason_is_printed_while_a_model_is_stuck(tmp_path):
    """The server exits before the model, whose thread cannot be ended."""
    stuck = (
        "    @staticmethod\n    def auto_complete_config(config):\n        __import__('time').sleep(3600)\n\n"
    )
    code = ADD_ONE.replace("    def execute", stuck + "    def execute")
    write_model(tmp_path, "stuck", CONFIG, model__py=code)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = (f"--model-repository={tmp_path}", f"--grpc-port={port}", "--exit-timeout-secs=0")
        with ServerProcess(*flags) as server:
            assert server.process.wait(60) == 1
            assert f"127.0.0.1:{port}" in server.output and "in use" in server.output


STARTS_SLOWLY = """
import os, pathlib, time

class TritonPythonModel:
    def initialize(self, args):
        pathlib.Path({file!r}).write_text(f"{{os.getpid()}}\\n")
        time.sleep(600)

    def execute(self, requests):
        return None
"""


def test_server_that_is_stopped_while_a_model_loads_logs_no_traceback(tmp_path):
    begun = tmp_path / "begun"
    write_model(tmp_path / "models", "slow", CONFIG, model__py=STARTS_SLOWLY.format(file=str(begun)))

    def stop() -> None:
        wait_until(lambda: begun.exists() and begun.read_text().endswith("\n"))
        os.kill(int(begun.read_text()), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with ServerProcess(f"--model-repository={tmp_path / 'models'}", "--exit-timeout-secs=2") as server:
        stopping.join()
        server.process.wait(60)
    assert "Traceback" not in server.output and "never retrieved" not in server.output, server.output
