"""TLS and mutual TLS over HTTP, gRPC and the OpenAI port, with real clients."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import parameters_model
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http as http_client
import tritonclient.http.aio as http_aio
import trustme
from server_process import ServerProcess
from tritonclient.utils import InferenceServerException


@dataclass(frozen=True)
class Files:
    """PEM files of the server, a client, and their certificate authorities."""

    folder: Path

    def __getattr__(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("pem")
    for name, identity in (("server", "127.0.0.1"), ("client", "client.example")):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(folder / f"{name}_ca.pem")
        leaf = authority.issue_cert(identity)
        leaf.private_key_pem.write_to_path(folder / f"{name}_key.pem")
        leaf.cert_chain_pems[0].write_to_path(folder / f"{name}_cert.pem")
    return Files(folder)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    parameters_model.write(path)
    return path


def tls_options(files: Files) -> list[str]:
    return [
        f"--http-server-cert={files.server_cert}",
        f"--http-server-key={files.server_key}",
        f"--grpc-server-cert={files.server_cert}",
        f"--grpc-server-key={files.server_key}",
    ]


@pytest.fixture(scope="module")
def one_sided(files: Files, repository: Path) -> Iterator[ServerProcess]:
    """Only the server has a certificate."""
    options = [*tls_options(files), "--grpc-use-ssl=true", f"--model-repository={repository}", "neso-pilot"]
    with ServerProcess(*options) as process:
        assert process.ports, process.output
        yield process


@pytest.fixture(scope="module")
def mutual(files: Files, repository: Path) -> Iterator[ServerProcess]:
    """Clients need a certificate too."""
    options = [
        *tls_options(files),
        f"--http-root-cert={files.client_ca}",
        f"--grpc-root-cert={files.client_ca}",
        "--grpc-use-ssl-mutual=true",
        f"--model-repository={repository}",
    ]
    with ServerProcess(*options) as process:
        assert process.ports, process.output
        yield process


def context_of(files: Files, *, certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files.server_ca)
    if certificate:
        context.load_cert_chain(files.client_cert, files.client_key)
    return context


def http_arguments(files: Files, *, certificate: bool) -> dict[str, Any]:
    options = {"ca_certs": files.server_ca}
    if certificate:
        options |= {"certfile": files.client_cert, "keyfile": files.client_key}
    return {"ssl": True, "ssl_options": options}


def grpc_arguments(files: Files, *, certificate: bool) -> dict[str, Any]:
    arguments = {"ssl": True, "root_certificates": files.server_ca}
    if certificate:
        arguments |= {"private_key": files.client_key, "certificate_chain": files.client_cert}
    return arguments


def inputs(module: Any) -> list[Any]:
    tensor = module.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"x"], np.object_))
    return [tensor]


@pytest.fixture(params=["one_sided", "mutual"])
def served(request: pytest.FixtureRequest) -> tuple[ServerProcess, bool]:
    """A server, and whether clients present a certificate."""
    return request.getfixturevalue(request.param), request.param == "mutual"


def test_http(served, files):
    process, certificate = served
    with http_client.InferenceServerClient(
        process.address("http"), **http_arguments(files, certificate=certificate)
    ) as client:
        assert client.is_server_live() and client.is_model_ready("parameters")
        for _ in range(3):
            result = client.infer("parameters", inputs(http_client), parameters={"a": 1})
            assert json.loads(result.as_numpy("OUT")[0]) == {"a": 1}


async def test_http_aio(served, files):
    process, certificate = served
    async with http_aio.InferenceServerClient(
        process.address("http"), ssl=True, ssl_context=context_of(files, certificate=certificate)
    ) as client:
        assert await client.is_server_live()
        result = await client.infer("parameters", inputs(http_aio))
        assert result.as_numpy("OUT")[0] == b"{}"


def test_grpc(served, files):
    process, certificate = served
    with grpc_client.InferenceServerClient(
        process.address("grpc"), **grpc_arguments(files, certificate=certificate)
    ) as client:
        assert client.is_server_live()
        assert client.infer("parameters", inputs(grpc_client)).as_numpy("OUT")[0] == b"{}"


async def test_grpc_aio(served, files):
    process, certificate = served
    async with grpc_aio.InferenceServerClient(
        process.address("grpc"), **grpc_arguments(files, certificate=certificate)
    ) as client:
        assert (await client.infer("parameters", inputs(grpc_aio))).as_numpy("OUT")[0] == b"{}"


def test_large_bodies(one_sided, files):
    """More than one TLS record and more than the write buffer, in both directions."""
    text = b"x" * (5 << 20)
    body = json.dumps(
        {
            "parameters": {"text": text.decode()},
            "inputs": [{"name": "IN", "shape": [1], "datatype": "BYTES", "data": ["x"]}],
        }
    )
    connection = http.client.HTTPSConnection(
        one_sided.address("http"), context=context_of(files, certificate=False), timeout=30
    )
    for _ in range(2):
        connection.request("POST", "/v2/models/parameters/infer", body)
        reply = json.loads(connection.getresponse().read())
        assert json.loads(reply["outputs"][0]["data"][0]) == {"text": text.decode()}
    connection.close()


def test_server_sent_events(one_sided, files):
    command = ["curl", "-sN", "--cacert", files.server_ca, "-d"]
    body = '{"text_input": "What is TLS?", "stream": true, "max_tokens": 8}'
    url = f"https://{one_sided.address('http')}/v2/models/neso-pilot/generate_stream"
    output = subprocess.run([*command, body, url], capture_output=True, check=True, timeout=100).stdout
    assert output.count(b"data: ") >= 2


@pytest.mark.parametrize("protocol", ["http", "openai"])
def test_openai(one_sided, files, protocol):
    from openai import OpenAI

    client = OpenAI(
        base_url=f"https://{one_sided.address(protocol)}/v1", api_key="none", http_client=_httpx_client(files)
    )
    reply = client.completions.create(model="neso-pilot", prompt="Hi", max_tokens=3)
    assert reply.usage is not None and reply.usage.completion_tokens == 3


def _httpx_client(files: Files) -> Any:
    from openai import DefaultHttpxClient

    return DefaultHttpxClient(verify=context_of(files, certificate=False))


def test_versions_and_alpn(one_sided, files):
    context = context_of(files, certificate=False)
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, port = one_sided.address("http").split(":")
    with (
        socket.create_connection((host, int(port))) as raw,
        context.wrap_socket(raw, server_hostname=host) as connection,
    ):
        assert connection.selected_alpn_protocol() == "http/1.1"
        assert connection.version() == "TLSv1.3"


def test_clients_without_a_certificate_are_rejected(mutual, files):
    connection = http.client.HTTPSConnection(
        mutual.address("http"), context=context_of(files, certificate=False), timeout=10
    )
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        connection.request("GET", "/v2")
        connection.getresponse()
    with grpc_client.InferenceServerClient(
        mutual.address("grpc"), **grpc_arguments(files, certificate=False)
    ) as client:
        with pytest.raises(InferenceServerException) as caught:
            client.is_server_live(client_timeout=60)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"


def test_plain_text_is_rejected_without_affecting_others(one_sided, files):
    host, port = one_sided.address("http").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in raw.recv(1000)
    with grpc.insecure_channel(one_sided.address("grpc")) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
    with http_client.InferenceServerClient(
        one_sided.address("http"), **http_arguments(files, certificate=False)
    ) as client:
        assert client.is_server_live()
    assert "Traceback" not in one_sided.output


def test_incomplete_handshakes_do_not_delay_shutdown(files):
    with ServerProcess(*tls_options(files), "--grpc-use-ssl=true") as server:
        host, port = server.address("http").split(":")
        with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))) as idle:
            context = context_of(files, certificate=False)
            with context.wrap_socket(idle, server_hostname=host):
                assert server.stop() == 0
        assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--http-server-cert=CERT"], "--http-server-cert and --http-server-key must be given together"),
        (["--http-server-cert=CERT", "--http-server-key=no.pem"], "the TLS key 'no.pem' cannot be read"),
        (["--http-server-cert=KEY", "--http-server-key=KEY"], "do not match, or one of them is not a PEM"),
        (["--grpc-use-ssl=true"], "--grpc-use-ssl needs --grpc-server-cert and --grpc-server-key"),
        (
            ["--grpc-use-ssl-mutual=true", "--grpc-server-cert=CERT", "--grpc-server-key=KEY"],
            "--grpc-use-ssl-mutual needs --grpc-root-cert",
        ),
        (
            ["--grpc-use-ssl=1", "--grpc-server-cert=CERT", "--grpc-server-key=CERT"],
            "--grpc-server-cert: the TLS certificate",
        ),
    ],
)
def test_invalid_options(files, options, message):
    options = [o.replace("CERT", files.server_cert).replace("KEY", files.server_key) for o in options]
    with ServerProcess(*options) as server:
        assert server.process.wait(60) == 2
        assert message in server.output and "Traceback" not in server.output


def test_certificates_without_use_ssl_log_a_warning(files):
    with ServerProcess(f"--grpc-server-cert={files.server_cert}") as server:
        assert "--grpc-server-cert has no effect without --grpc-use-ssl=true" in server.output
        with grpc_client.InferenceServerClient(server.address("grpc")) as client:
            assert client.is_server_live()
