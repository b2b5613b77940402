"""Requests of handwritten clients: chunked uploads, Expect headers, raw tensors."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from server_process import ServerProcess
from test_doc_examples import IDENTITY, IDENTITY_CONFIG

INFER = "/v2/models/identity/infer"
TEXT_CONFIG = IDENTITY_CONFIG.replace("TYPE_FP32", "TYPE_STRING").replace("dims: [-1]", "dims: [1]")
GRID_CONFIG = IDENTITY_CONFIG.replace("dims: [-1]", "dims: [-1, -1]")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    for name, config in (("identity", IDENTITY_CONFIG), ("text", TEXT_CONFIG), ("grid", GRID_CONFIG)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1" / "model.py").write_text(IDENTITY)
    with ServerProcess(f"--model-repository={repository}", f"--http-max-input-size={1 << 20}") as server:
        assert server.ports, server.output
        yield server


def curl(*arguments: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the last response; interim ones are skipped."""
    output = subprocess.run(["curl", "-si", *arguments], capture_output=True, timeout=100, check=True).stdout
    status, headers, body = 100, "", output
    while status == 100:
        head, _, body = body.partition(b"\r\n\r\n")
        first, _, headers = head.decode().partition("\r\n")
        status = int(first.split()[1])
    fields = dict(line.lower().split(": ", 1) for line in headers.split("\r\n") if line)
    return status, fields, body


def document(count: int = 3) -> str:
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, count], "data": [1.0] * count}
    return json.dumps({"inputs": [tensor]})


@pytest.mark.parametrize(
    "headers",
    [
        ["-H", "Transfer-Encoding: chunked"],
        ["-H", "Expect: 100-continue"],
        ["-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue"],
        ["--http1.0"],
        ["-H", "Connection: close"],
    ],
    ids=["chunked", "expect", "chunked-expect", "http1.0", "close"],
)
@pytest.mark.parametrize("count", [3, 50_000])
def test_ways_to_send_a_body(served, tmp_path, headers, count):
    body = tmp_path / "body.json"
    body.write_text(document(count))
    status, _, response = curl("-X", "POST", served.url(INFER), *headers, "--data-binary", f"@{body}")
    assert status == 200
    assert json.loads(response)["outputs"][0]["data"] == [1.0] * count


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(served, tmp_path, chunked):
    body = tmp_path / "body.json"
    body.write_text(document(500_000))
    headers = ["-H", "Transfer-Encoding: chunked"] if chunked else []
    status, _, response = curl(served.url(INFER), *headers, "--data-binary", f"@{body}")
    assert status == 400 and "1048576" in json.loads(response)["error"]


def raw(served: ServerProcess, model: str, path: Path, *headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send a request whose body is the file, the model's only input."""
    url = served.url(f"/v2/models/{model}/infer")
    return curl(
        url,
        *("-H", "Content-Type: application/octet-stream"),
        *("-H", "Inference-Header-Content-Length: 0"),
        *headers,
        *("--data-binary", f"@{path}"),
    )


@pytest.mark.parametrize("headers", [[], ["-H", "Transfer-Encoding: chunked"]], ids=["length", "chunked"])
def test_raw_numbers(served, tmp_path, headers):
    values = np.arange(5, dtype=np.float32)
    path = tmp_path / "raw"
    path.write_bytes(values.tobytes())
    status, fields, body = raw(served, "identity", path, *headers)
    assert status == 200
    length = int(fields["inference-header-content-length"])
    [output] = json.loads(body[:length])["outputs"]
    assert (output["shape"], output["parameters"]) == ([1, 5], {"binary_data_size": 20})
    assert np.frombuffer(body[length:], np.float32).tolist() == values.tolist()


def test_raw_text(served, tmp_path):
    path = tmp_path / "raw"
    path.write_bytes(b"drei \xc2\xa7")
    status, fields, body = raw(served, "text", path)
    assert status == 200
    length = int(fields["inference-header-content-length"])
    assert json.loads(body[:length])["outputs"][0]["shape"] == [1, 1]
    assert body[length:] == b"\x07\x00\x00\x00drei \xc2\xa7"


def test_raw_tensors_with_variable_shape(served, tmp_path):
    path = tmp_path / "raw"
    path.write_bytes(bytes(8))
    status, _, body = raw(served, "grid", path)
    assert status == 400
    assert "can not be deduced because there are more than one variable-sized dimension" in body.decode()
    path.write_bytes(bytes(7))
    assert raw(served, "identity", path)[0] == 400
