"""Server metrics and use of processes."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from eventually import wait_until

from neso.perf.output_options import OutputOptions
from neso.perf.telemetry import start
from neso.perf.telemetry.collector import changes, default_metrics_urls
from neso.perf.telemetry.processes import is_local, listening_process, process_tree, use_of
from neso.perf.telemetry.prometheus import Endpoint, Sample, metrics_url, parse

TEXT = """# HELP requests Requests.
# TYPE requests counter
requests_total{path="a b}",code="200"} %d
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model="m"} 3.5 1700000000000
# TYPE latency histogram
latency_bucket{le="0.1"} 1
latency_bucket{le="+Inf"} %d # {trace="x"} 0.5
latency_sum 0.75
latency_count %d
"""


def test_prometheus_text_is_parsed():
    kinds, values = parse(TEXT % (1, 2, 3))
    assert kinds == {"requests": "counter", "vllm:num_requests_running": "gauge", "latency": "histogram"}
    assert values == {
        'requests_total{path="a b}",code="200"}': 1,
        'vllm:num_requests_running{model="m"}': 3.5,
        'latency_bucket{le="0.1"}': 1,
        'latency_bucket{le="+Inf"}': 2,
        "latency_sum": 0.75,
        "latency_count": 3,
    }


@pytest.mark.parametrize("text", ["<html>", '{"detail": "Not Found"}', "up one", "a b c d", "}"])
def test_other_formats_are_rejected(text):
    with pytest.raises(ValueError, match="not Prometheus text"):
        parse(text)


def test_changes_count_a_restart_from_zero():
    endpoint = Endpoint("u", kinds={"a": "counter", "g": "gauge"})
    endpoint.samples = [Sample(0, {"a": 5, "g": 9}), Sample(1, {"a": 8, "g": 1}), Sample(2, {"a": 2, "g": 4})]
    assert changes(endpoint) == {"a": 5}


def test_urls():
    assert metrics_url("host:8002") == "http://host:8002/metrics"
    assert metrics_url("https://host/other") == "https://host/other"
    assert default_metrics_urls("h", 8000)[:2] == ["http://h:8000/metrics", "http://h:8002/metrics"]
    assert default_metrics_urls("h", 9999)[0] == "http://h:9999/metrics"


@pytest.fixture
def server():
    """A metrics server: set `answer` to the text, or to None for a server that does not answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            httpd.count += 1
            if httpd.answer is None:
                httpd.release.wait(20)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(httpd.answer(httpd.count).encode())

        def log_message(self, *arguments: object) -> None:
            pass

    httpd: Any = HTTPServer(("127.0.0.1", 0), Handler)
    httpd.count, httpd.answer, httpd.release = (
        0,
        lambda count: TEXT % (count, count, count),
        threading.Event(),
    )
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield httpd
    httpd.release.set()
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def options(server: Any, **others: Any) -> OutputOptions:
    return OutputOptions(
        server_metrics=(f"127.0.0.1:{server.server_port}",), telemetry_interval=0.05, **others
    )


def test_metrics_and_use_are_collected_while_the_load_runs(server):
    collector = start(options(server), f"127.0.0.1:{server.server_port}")
    wait_until(lambda: server.count >= 4)
    found = collector.stop()
    assert found["errors"] == []
    change = found["summary"]["server_metrics"]
    assert change["latency_count"] >= 3 and "latency_sum" not in change
    charts = {series["group"]: series for series in found["series"]}
    running = charts["Running and waiting requests"]
    assert len(running["values"]) >= 4 and set(running["values"]) == {3.5}
    assert charts["Memory of the server"]["values"][0] > 0
    assert all(cores >= 0 for cores in charts["CPU of the server"]["values"])


def test_an_endpoint_in_another_format_is_read_once(server):
    server.answer = lambda count: "<html>" * 100
    collector = start(options(server, telemetry=False), "remote.invalid:80")
    wait_until(lambda: collector._metrics.endpoints[0].error)
    found = collector.stop()
    assert server.count == 1
    assert "not Prometheus text" in found["errors"][0]


def test_an_endpoint_that_does_not_answer_is_given_up(server, monkeypatch):
    monkeypatch.setattr("neso.perf.telemetry.prometheus.TIMEOUT", 0.1)
    server.answer = None
    collector = start(options(server, telemetry=False), "")
    wait_until(lambda: collector._metrics.endpoints[0].error)
    assert "timed out" in collector.stop()["errors"][0]


def test_default_endpoints_that_do_not_exist_are_no_errors():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = start(OutputOptions(telemetry_interval=0.05), f"127.0.0.1:{port}").stop()
    assert found["errors"] == [] and found["summary"]["server_metrics"] == {}


def test_processes_are_found_by_their_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert listening_process(listener.getsockname()[1]) == os.getpid()
        port = listener.getsockname()[1]
    assert listening_process(port) is None
    assert os.getpid() in process_tree(os.getppid())
    use = use_of([os.getpid()])
    assert use.cpu_seconds > 0 and use.resident_bytes > 1e6


def test_local_addresses():
    assert is_local("localhost") and is_local("127.0.0.1")
    assert not is_local("192.0.2.1") and not is_local("no-such-host.invalid")
