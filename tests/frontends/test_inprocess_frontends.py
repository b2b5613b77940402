"""Frontends of an in-process server, with real clients."""

from __future__ import annotations

import threading
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from eventually import wait_until
from repository_builder import RepositoryBuilder
from tritonclient.utils import InferenceServerException

import neso
from neso.frontends.transport.http1 import BindError

CLIENTS = {"http": http_client, "grpc": grpc_client}
FRONTENDS = {"http": neso.KServeHttp, "grpc": neso.KServeGrpc}


@pytest.fixture
def server(tmp_path):
    RepositoryBuilder(tmp_path).add_standard()
    with neso.Server(model_repository=tmp_path, exit_timeout=60) as server:
        yield server


@pytest.fixture
def slow(tmp_path):
    """The folder of a model whose request ends when the file `go` exists."""
    return tmp_path / "slow" / "1"


def frontend(protocol, server, port=0):
    kind = FRONTENDS[protocol]
    return kind(server, kind.Options(host="127.0.0.1", port=port))


def send_request(protocol, port, model="identity"):
    module = CLIENTS[protocol]
    tensor = module.InferInput("IN", [2], "FP32")
    tensor.set_data_from_numpy(np.array([1, 2], np.float32))
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        return client.infer(model, [tensor]).as_numpy("OUT").tolist()


@pytest.mark.parametrize("protocol", FRONTENDS)
def test_restart(protocol, server):
    service = frontend(protocol, server)
    with pytest.raises(neso.Unavailable, match="has not been started"):
        _ = service.port
    for _ in range(3):
        with service:
            port = service.port
            assert send_request(protocol, port) == [1, 2]
            with pytest.raises(neso.AlreadyExists):
                service.start()
        with pytest.raises((InferenceServerException, OSError)):
            send_request(protocol, port)
    service.stop()


def test_all_frontends_with_in_process_requests(server):
    with frontend("http", server) as http, frontend("grpc", server) as grpc:
        metrics = neso.Metrics(server, neso.Metrics.Options(host="127.0.0.1", port=0)).start()
        assert send_request("http", http.port) == send_request("grpc", grpc.port) == [1, 2]
        (response,) = server.model("identity").infer(inputs={"IN": [3]})
        assert response.outputs["OUT"].numpy().tolist() == [3]
        text = urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics").read().decode()
        assert 'nv_inference_request_success{model="identity",version="1"} 3' in text
        metrics.stop()


@pytest.mark.parametrize("protocol", FRONTENDS)
def test_port_in_use(protocol, server):
    with frontend(protocol, server) as service:
        second = frontend(protocol, server, service.port)
        with pytest.raises((BindError, neso.Unavailable), match="in use"):
            second.start()
        second.stop()
        assert send_request(protocol, service.port) == [1, 2]


@pytest.mark.parametrize("protocol", FRONTENDS)
def test_stop_waits_for_requests_in_flight(protocol, server, slow):
    service = frontend(protocol, server).start()
    answers = []
    client = threading.Thread(target=lambda: answers.append(send_request(protocol, service_port, "slow")))
    service_port = service.port
    client.start()
    wait_until((slow / "begun").exists)
    threading.Timer(0.3, (slow / "go").touch).start()
    service.stop()
    client.join(60)
    assert answers == [[1, 2]]


@pytest.mark.parametrize("protocol", FRONTENDS)
def test_server_stop_stops_frontends(protocol, server, slow):
    service = frontend(protocol, server).start()
    port = service.port
    answers = []
    client = threading.Thread(target=lambda: answers.append(send_request(protocol, port, "slow")))
    client.start()
    wait_until((slow / "begun").exists)
    threading.Timer(0.3, (slow / "go").touch).start()
    server.stop()
    client.join(60)
    assert answers == [[1, 2]]
    for _ in range(3):  # later calls are rejected without side effects
        with pytest.raises((InferenceServerException, OSError)):
            send_request(protocol, port)
    service.stop()
    with pytest.raises(neso.Unavailable):
        service.start()


def test_two_servers_in_one_process(server, tmp_path):
    with (
        neso.Server(model_repository=tmp_path, server_id="other") as other,
        frontend("grpc", server) as first,
        frontend("grpc", other) as second,
    ):
        names = []
        for service in (first, second):
            with grpc_client.InferenceServerClient(f"127.0.0.1:{service.port}") as client:
                names.append(client.get_server_metadata().name)
        assert names == ["neso", "other"]
        assert send_request("grpc", first.port) == send_request("grpc", second.port) == [1, 2]
