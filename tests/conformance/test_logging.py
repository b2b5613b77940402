"""The log of a server process, and changes of its settings by clients."""

from __future__ import annotations

import json
import re

import pytest
import tritonclient.http as triton
from eventually import wait_until
from server_process import ServerProcess

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_verbose("so to say")
        pb_utils.Logger.log_warn("I say")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
REQUEST = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("repository")
    (repository / "talker" / "1").mkdir(parents=True)
    (repository / "talker" / "config.pbtxt").write_text(CONFIG)
    (repository / "talker" / "1" / "model.py").write_text(MODEL)
    with ServerProcess(f"--model-repository={repository}") as process:
        yield process


def test_lines_match_triton_format(server):
    pattern = (
        r'^I\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ \w+\.py:\d+\] "loaded version 1 of model \'talker\' in .* s"$'
    )
    assert re.search(pattern, server.output, re.MULTILINE), server.output


def test_a_client_changes_the_log(server):
    with triton.InferenceServerClient(server.address("http")) as client:
        client.update_log_settings({"log_format": "JSON", "log_verbose_level": 1})
    seen = len(server.output)
    assert server.post("/v2/models/talker/infer", REQUEST)[0] == 200
    wait_until(lambda: "I say" in server.output[seen:])
    entries = [json.loads(line) for line in server.output[seen:].splitlines() if '"neso.model"' in line]
    reported = [(entry["level"], entry["message"], entry["model"], entry["file"]) for entry in entries]
    assert reported == [
        ("DEBUG", "so to say", "talker", "model.py"),
        ("WARNING", "I say", "talker", "model.py"),
    ]
    assert (
        server.post("/v2/logging", {"log_warning": False, "log_verbose_level": 0})[1]["log_warning"] is False
    )
    seen = len(server.output)
    assert server.post("/v2/models/talker/infer", REQUEST)[0] == 200
    assert server.post("/v2/logging", {"log_warning": True})[0] == 200
    assert server.post("/v2/models/talker/infer", REQUEST)[0] == 200
    wait_until(lambda: "I say" in server.output[seen:])
    assert server.output[seen:].count("say") == 1  # of the second request


def test_verbose_log_has_a_line_for_each_http_request(server):
    def request_metadata(verbose_level):
        """Request the metadata of an unknown model at this verbose level, and return the lines logged meanwhile."""
        seen = len(server.output)
        settings = {"log_format": "default", "log_warning": True, "log_verbose_level": verbose_level}
        assert server.post("/v2/logging", settings)[0] == 200
        assert server.get("/v2/models/talk%0Aer")[0] == 404
        assert server.post("/v2/models/talker/infer", REQUEST)[0] == 200
        wait_until(lambda: "I say" in server.output[seen:])
        return server.output[seen:]

    assert '"HTTP request: GET /v2/models/talk%0Aer"' in request_metadata(1)
    assert "HTTP request: GET" not in request_metadata(0)
