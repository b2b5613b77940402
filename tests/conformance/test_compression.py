"""Compressed requests and responses against a real server: `tritonclient` over HTTP and gRPC, and curl."""

from __future__ import annotations

import gzip
import queue
import subprocess
import sys
import urllib.error
import urllib.request
import zlib

import numpy as np
import orjson
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as client
from server_process import ServerProcess
from test_doc_examples import IDENTITY, IDENTITY_CONFIG
from tritonclient.utils import InferenceServerException
from wire_counter import WireCounter

LIMIT = 1 << 20
INFER = "/v2/models/identity/infer"
VALUES = np.arange(4096, dtype=np.float32).reshape(2, 2048)
BODY = {"inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    (folder / "identity" / "1").mkdir(parents=True)
    (folder / "identity" / "config.pbtxt").write_text(IDENTITY_CONFIG)
    (folder / "identity" / "1" / "model.py").write_text(IDENTITY)
    return folder


@pytest.fixture(scope="module")
def served(repository):
    with ServerProcess(f"--model-repository={repository}", f"--http-max-input-size={LIMIT}") as server:
        yield server


@pytest.fixture(scope="module")
def triton(served):
    with client.InferenceServerClient(served.address("http")) as connection:
        yield connection


def infer(triton, request=None, response=None, binary=True) -> client.InferResult:
    tensor = client.InferInput("INPUT", list(VALUES.shape), "FP32")
    tensor.set_data_from_numpy(VALUES, binary_data=binary)
    return triton.infer(
        "identity",
        [tensor],
        outputs=[client.InferRequestedOutput("OUTPUT", binary_data=binary)],
        request_compression_algorithm=request,
        response_compression_algorithm=response,
    )


def post(served, body: bytes, **headers: str):
    """Return status, headers and body of an infer request."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(served.url(INFER), body, names)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("response", [None, "gzip", "deflate"])
@pytest.mark.parametrize("request_coding", [None, "gzip", "deflate"])
def test_tritonclient(triton, request_coding, response, binary):
    result = infer(triton, request_coding, response, binary)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT"), VALUES)


def test_header_length_is_the_uncompressed_length(served):
    body = orjson.dumps({**BODY, "parameters": {"binary_data_output": True}})
    status, headers, response = post(served, body, Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert int(headers["Content-Length"]) == len(response)
    plain = gzip.decompress(response)
    length = int(headers["Inference-Header-Content-Length"])
    assert orjson.loads(plain[:length])["outputs"][0]["parameters"] == {"binary_data_size": 12}
    assert np.frombuffer(plain[length:], np.float32).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        (None, None),
        ("identity", None),
        ("br", None),
        ("gzip;q=0", None),
        ("gzip;q=0.5, identity", None),
        ("gzip, deflate", "gzip"),
        ("gzip;q=0.4, deflate;q=0.8", "deflate"),
        ("br, *;q=0.1", "gzip"),
        ("GZIP", "gzip"),
    ],
)
def test_accept_encoding(served, accepted, expected):
    headers = {} if accepted is None else {"Accept_Encoding": accepted}
    status, answered, response = post(served, orjson.dumps(BODY), **headers)
    assert (status, answered["Content-Encoding"]) == (200, expected)
    unpack = {None: bytes, "gzip": gzip.decompress, "deflate": zlib.decompress}[expected]
    assert orjson.loads(unpack(response))["outputs"][0]["data"] == [1, 2, 3]


def test_curl(served, tmp_path):
    packed = tmp_path / "body.gz"
    packed.write_bytes(gzip.compress(orjson.dumps(BODY)))
    command = ["curl", "-sS", "--compressed", "-D", "-", served.url(INFER)]
    command += ["-H", "Content-Encoding: gzip", "--data-binary", f"@{packed}"]
    output = subprocess.run(command, capture_output=True, check=True).stdout
    head, _, body = output.partition(b"\r\n\r\n")
    assert b"content-encoding: " in head.lower()
    assert orjson.loads(body)["outputs"][0]["data"] == [1, 2, 3]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda packed: b"no such thing", "failed to decompress"),
        (lambda packed: packed[:-6], "cut off"),
        (lambda packed: packed + b"more", "4 bytes follow"),
        (lambda packed: b"", "cut off"),
    ],
    ids=["broken", "cut off", "more behind", "empty"],
)
def test_invalid_data(served, coding, spoil, words):
    packed = spoil(COMPRESS[coding](orjson.dumps(BODY)))
    status, _, response = post(served, packed, Content_Encoding=coding)
    assert status == 400 and words in orjson.loads(response)["error"]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_decompressed_size_is_limited(served, coding):
    text = orjson.dumps(BODY)
    fits = COMPRESS[coding](text + b" " * (LIMIT - len(text)))
    assert post(served, fits, Content_Encoding=coding)[0] == 200
    bomb = COMPRESS[coding](text + b" " * (LIMIT - len(text) + 1))
    status, _, response = post(served, bomb, Content_Encoding=coding)
    message = f"Decompressed data size exceeds the maximum allowed value of {LIMIT} bytes."
    assert status == 400 and message in orjson.loads(response)["error"]


def test_unknown_coding_error_lists_known_codings(served):
    status, headers, response = post(served, b"x", Content_Encoding="br")
    assert status == 501 and orjson.loads(response) == {"error": "Unsupported compression type"}
    assert headers["Accept-Encoding"] == "gzip, deflate"


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_generate_rejects_compressed_bodies(served, path):
    url = f"/v2/models/identity/{path}"
    status, response = served.post(url, gzip.compress(b'{"INPUT": 1}'), **{"Content-Encoding": "gzip"})
    expected = {"error": "Unsupported content-encoding, only 'identity' is supported."}
    assert (status, response) == (400, expected)


def test_identity_coding_leaves_the_body_unchanged(served):
    assert post(served, orjson.dumps(BODY), Content_Encoding="identity")[0] == 200
    url = "/v2/models/identity/generate"
    assert served.post(url, {"INPUT": [1.0]}, **{"Content-Encoding": "identity"})[0] == 200


def test_errors_are_readable_by_the_client(triton):
    tensor = client.InferInput("OTHER", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with pytest.raises(InferenceServerException, match="unexpected inference input 'OTHER'"):
        triton.infer(
            "identity",
            [tensor],
            request_compression_algorithm="gzip",
            response_compression_algorithm="gzip",
        )


def grpc_infer(counter: WireCounter, coding: str | None = None) -> tuple[int, int]:
    """Return bytes sent and received for one inference on 256 KiB of zeros."""
    zeros = np.zeros((1, 1 << 16), np.float32)
    tensor = grpc_client.InferInput("INPUT", list(zeros.shape), "FP32")
    tensor.set_data_from_numpy(zeros)
    with grpc_client.InferenceServerClient(f"127.0.0.1:{counter.port}") as triton:
        assert triton.is_server_live()
        sent, received = counter.sent, counter.received
        result = triton.infer("identity", [tensor], compression_algorithm=coding)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT"), zeros)
        return counter.sent - sent, counter.received - received


@pytest.mark.parametrize("coding", [None, "gzip", "deflate"])
def test_grpc_requests(served, coding):
    with WireCounter(served.ports["grpc"]) as counter:
        sent, received = grpc_infer(counter, coding)
    assert (sent < 1 << 14) == (coding is not None)
    assert received > 1 << 18, "the server does not compress unless told so"


@pytest.mark.parametrize("level", ["none", "low", "medium", "high"])
def test_grpc_responses(repository, level):
    option = f"--grpc-infer-response-compression-level={level}"
    with (
        ServerProcess(f"--model-repository={repository}", option) as server,
        WireCounter(server.ports["grpc"]) as counter,
    ):
        _, received = grpc_infer(counter)
        assert (received < 1 << 14) == (level != "none")
        grpc_infer(counter, "gzip")


def test_grpc_streams_are_compressed(repository):
    option = "--grpc-infer-response-compression-level=high"
    results: queue.Queue = queue.Queue()
    tensor = grpc_client.InferInput("INPUT", [1, 1 << 16], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 1 << 16), np.float32))
    with (
        ServerProcess(f"--model-repository={repository}", option) as server,
        WireCounter(server.ports["grpc"]) as counter,
        grpc_client.InferenceServerClient(f"127.0.0.1:{counter.port}") as triton,
    ):
        triton.start_stream(lambda result, error: results.put(error or result), compression_algorithm="gzip")
        triton.async_stream_infer("identity", [tensor])
        assert results.get(timeout=60).as_numpy("OUTPUT").shape == (1, 1 << 16)
        triton.stop_stream()
        assert counter.sent < 1 << 14 and counter.received < 1 << 14


def test_unknown_level_is_rejected():
    command = [sys.executable, "-m", "neso.cli", "serve", "--grpc-infer-response-compression-level=most"]
    assert subprocess.run(command, capture_output=True, timeout=100).returncode == 2
