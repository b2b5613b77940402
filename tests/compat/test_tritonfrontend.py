"""Options and errors of `tritonfrontend`. test_tritonserver.py tests serving."""

from __future__ import annotations

import socket

import grpc
import pytest
import trustme
from free_port import free_port
from tritonclient.grpc import service_pb2, service_pb2_grpc

from neso.compat import tritonfrontend, tritonserver
from neso.frontends.frontend_options import ResponseCompression

SERVICES = (tritonfrontend.KServeHttp, tritonfrontend.KServeGrpc, tritonfrontend.Metrics)


@pytest.fixture
def server(tmp_path):
    with tritonserver.Server(model_repository=str(tmp_path)) as server:
        yield server


def test_defaults():
    assert [service.Options().port for service in SERVICES] == [8000, 8001, 8002]
    assert {service.Options().address for service in SERVICES} == {"0.0.0.0"}
    assert tritonfrontend.KServeHttp.Options().to_neso().port == 8000


@pytest.mark.parametrize("service", SERVICES)
def test_pydantic_checks_options(service):
    for wrong in (-1, 65536, "x"):
        with pytest.raises(ValueError, match="port"):
            service.Options(port=wrong)
    with pytest.raises(ValueError, match="no_such_option"):
        service.Options(no_such_option=1)


def test_options_are_passed_on():
    options = tritonfrontend.KServeGrpc.Options(
        address="127.0.0.1",
        port=1234,
        keepalive_time_ms=5,
        max_connection_age_ms=7,
        infer_compression_level=tritonfrontend.KServeGrpc.Grpc_compression_level.HIGH,
    ).to_neso()
    assert (options.address, options.keepalive_time_ms, options.max_connection_age_ms) == (
        "127.0.0.1:1234",
        5,
        7,
    )
    assert options.response_compression is ResponseCompression.high


def test_options_without_effect_warn():
    with pytest.warns(UserWarning, match="thread_count has no effect"):
        tritonfrontend.KServeHttp.Options(thread_count=2).to_neso()
    with pytest.warns(UserWarning, match="http2_max_pings_without_data has no effect"):
        tritonfrontend.KServeGrpc.Options(http2_max_pings_without_data=1).to_neso()


def test_header_forwarding_and_reuse_port():
    for options in (
        tritonfrontend.KServeHttp.Options(header_forward_pattern="x-.*", reuse_port=True),
        tritonfrontend.KServeGrpc.Options(forward_header_pattern="x-.*", reuse_port=True),
    ):
        made = options.to_neso()
        assert made.reuse_port
        assert made.header_forwarding.parameters([("X-A", "1"), ("B", "2")]) == {"x-a": "1"}
    with pytest.raises(tritonfrontend.InvalidArgumentError, match="regular expression"):
        tritonfrontend.KServeHttp.Options(header_forward_pattern="(").to_neso()


def test_mutual_tls(server, tmp_path):
    authority = trustme.CA()
    certificate, client = authority.issue_cert("localhost"), authority.issue_cert("client")
    files = {name: tmp_path / name for name in ("certificate", "key", "root")}
    certificate.cert_chain_pems[0].write_to_path(files["certificate"])
    certificate.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["root"])
    port = free_port()
    options = tritonfrontend.KServeGrpc.Options(
        address="127.0.0.1",
        port=port,
        use_mutual_auth=True,
        server_cert=str(files["certificate"]),
        server_key=str(files["key"]),
        root_cert=str(files["root"]),
    )
    root = authority.cert_pem.bytes()
    with tritonfrontend.KServeGrpc(server, options):
        address = f"localhost:{port}"
        ours = grpc.ssl_channel_credentials(
            root, client.private_key_pem.bytes(), client.cert_chain_pems[0].bytes()
        )
        with grpc.secure_channel(address, ours) as channel:
            grpc.channel_ready_future(channel).result(60)
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(root)) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError):
                stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=10)


@pytest.mark.parametrize("service", SERVICES)
def test_invalid_uses_are_rejected(service, server):
    with pytest.raises(tritonfrontend.InvalidArgumentError, match=f"type {service.__name__}.Options"):
        service(server, {"port": 1})
    with pytest.raises(tritonfrontend.InvalidArgumentError, match="Server not started"):
        service(tritonserver.Server(model_repository="x"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(tritonfrontend.UnavailableError, match="in use"):
            service(server, service.Options(address="127.0.0.1", port=port)).start()
    running = service(server, service.Options(address="127.0.0.1", port=0))
    running.start()
    with pytest.raises(tritonfrontend.AlreadyExistsError):
        running.start()
    running.stop()
    running.stop()
