"""The options and errors of `tritonfrontend`; that it serves is seen in scripts (test_tritonserver.py)."""

from __future__ import annotations

import socket

import pytest

from neso.compat import tritonfrontend, tritonserver
from neso.frontends.kserve_grpc.options import ResponseCompression

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


def test_options_without_effect_warn_and_those_one_relies_on_are_refused():
    with pytest.warns(UserWarning, match="thread_count has no effect"):
        tritonfrontend.KServeHttp.Options(thread_count=2).to_neso()
    with pytest.raises(tritonfrontend.UnsupportedError, match="use_ssl"):
        tritonfrontend.KServeGrpc.Options(use_ssl=True, server_cert="c", server_key="k").to_neso()
    with pytest.raises(tritonfrontend.UnsupportedError, match="header_forward_pattern"):
        tritonfrontend.KServeHttp.Options(header_forward_pattern=".*").to_neso()


@pytest.mark.parametrize("service", SERVICES)
def test_wrong_uses(service, server):
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
