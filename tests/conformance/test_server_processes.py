"""`--server-processes 2`: both processes behave like one server.

The tests of the protocols below run with the fixture `server` of this module.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpc_client
from eventually import wait_until
from server_process import ServerProcess
from step_pace import slow_environment

# Collected here a second time, with this module's server.
from test_kserve_grpc import (  # noqa: F401
    test_health_and_metadata,
    test_stream_with_final_flags,
    test_unary_on_a_decoupled_model_is_rejected,
    triton,
)
from test_kserve_http import test_generate_parameters_at_either_level, test_readme_curl_example  # noqa: F401
from test_openai import (  # noqa: F401
    api,
    test_chat,
    test_chat_stream_with_usage,
    test_completion_length_logprobs_and_n,
    test_models,
)

from neso.models import SHIPPED_MODELS

MODEL = "neso-pilot"
CONNECTIONS = 32
"""The kernel chooses the process of a connection; with this many, both have some."""
STREAM = {"model": MODEL, "prompt": "def", "temperature": 0, "ignore_eos": True, "stream": True}

DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * array)]) for array in arrays]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
%s
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
"""


class Connections:
    """Open HTTP connections, over all processes of a server."""

    def __init__(self, server: ServerProcess, protocol: str = "http", number: int = CONNECTIONS) -> None:
        self.all = [
            http.client.HTTPConnection("127.0.0.1", server.ports[protocol], timeout=60) for _ in range(number)
        ]
        for connection in self.all:
            connection.connect()
        wait_until(lambda: sum(served_by(server).values()) >= number)
        counts = served_by(server)
        assert len(counts) == 2 and all(counts.values()), counts

    def close(self) -> None:
        for connection in self.all:
            connection.close()


def find_front_end(server: ServerProcess) -> psutil.Process | None:
    """Return the front-end process; None while it is being started again."""
    for child in psutil.Process(server.process.pid).children():
        with suppress(psutil.NoSuchProcess):
            if "neso.cli.front_end_process" in child.cmdline():
                return child
    return None


def front_end(server: ServerProcess) -> psutil.Process:
    """Return the front-end process."""
    found = find_front_end(server)
    assert found is not None, "there is no front-end process"
    return found


def listening_ports(process: psutil.Process) -> set[int]:
    """Return the ports on which a process listens; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        found = process.net_connections("tcp")
        return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}
    return set()


def served_by(server: ServerProcess) -> dict[int, int]:
    """Return the number of client connections by process."""
    ports = set(server.ports.values())
    counts = {}
    for process in (psutil.Process(server.process.pid), front_end(server)):
        found = [c for c in process.net_connections("tcp") if c.laddr.port in ports and c.raddr]
        counts[process.pid] = len(found)
    return counts


def request(
    connection: http.client.HTTPConnection, method: str, path: str, body: object = None, **headers: str
) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    return response.status, response.read()


def infer_body(value: int) -> dict[str, object]:
    return {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [value]}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The bundled model with slow steps, so that requests last, and Python models, in two processes."""
    root = tmp_path_factory.mktemp("models")
    for name, cache in (("double", ""), ("cached", "response_cache { enable: true }")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(DOUBLE)
        (root / name / "config.pbtxt").write_text(CONFIG % cache)
    process = ServerProcess(
        f"{MODEL}={SHIPPED_MODELS[MODEL]}",
        f"--model-repository={root}",
        "--model-control-mode=explicit",
        "--load-model=double",
        "--load-model=cached",
        "--cache-config=local,size=1048576",
        "--allow-client-shm=true",
        "--server-processes=2",
        environment=slow_environment(tmp_path_factory.mktemp("slow"), 0.005),
    )
    with process:
        assert process.ports, process.output
        yield process


@pytest.fixture
def connections(server: ServerProcess) -> Iterator[list[http.client.HTTPConnection]]:
    opened = Connections(server)
    yield opened.all
    opened.close()


def test_statistics_and_metrics_are_the_sums(server, connections):
    name = f'{{model="{MODEL}",version="1"}}'
    before = server.metrics()
    body = {"text_input": "def", "parameters": {"max_tokens": 2, "temperature": 0}}
    for connection in connections:
        assert request(connection, "POST", f"/v2/models/{MODEL}/generate", body)[0] == 200
        assert request(connection, "POST", "/v2/models/double/infer", infer_body(1))[0] == 200
    after = server.metrics()

    def grown(metric: str) -> float:
        return after[metric] - before[metric]

    number = len(connections)
    assert grown(f"nv_inference_request_success{name}") == number
    assert grown(f"vllm:generation_tokens_total{name}") == 2 * number
    assert grown(f"vllm:time_to_first_token_seconds_count{name}") == number
    assert grown('nv_inference_request_success{model="double",version="1"}') == number
    answers = {request(each, "GET", f"/v2/models/{MODEL}/stats")[1] for each in connections}
    assert len(answers) == 1  # every process reports the same
    (statistics,) = json.loads(answers.pop())["model_stats"]
    assert statistics["inference_stats"]["success"]["count"] == after[f"nv_inference_request_success{name}"]


def test_large_tensors_and_strings_pass_the_main_process(connections):
    values = list(range(300_000))
    tensor = {"name": "IN", "shape": [1, len(values)], "datatype": "INT32", "data": values}
    for connection in connections[:6]:
        status, reply = request(connection, "POST", "/v2/models/double/infer", {"inputs": [tensor]})
        assert status == 200 and json.loads(reply)["outputs"][0]["data"] == [2 * value for value in values]


def test_errors_are_the_same_in_both_processes(connections):
    wrong = {"inputs": [{"name": "NO", "shape": [1, 1], "datatype": "INT32", "data": [1]}]}
    for path, body in (
        ("/v2/models/double/infer", wrong),
        ("/v2/models/nobody/infer", infer_body(1)),
        ("/v2/models/double/versions/9/infer", infer_body(1)),
        (f"/v2/models/{MODEL}/generate", {"text_input": "x", "parameters": {"temperature": -1}}),
    ):
        answers = {request(connection, "POST", path, body) for connection in connections}
        assert len(answers) == 1, answers
        assert answers.pop()[0] >= 400


def test_a_load_is_visible_everywhere_before_its_answer(connections):
    for round in range(4):
        operation, expected = (("unload", 400), ("load", 200))[round % 2]
        control = connections[round * 5]
        assert request(control, "POST", f"/v2/repository/models/double/{operation}")[0] == 200
        for connection in connections:
            assert request(connection, "GET", "/v2/models/double/ready")[0] == expected
            status, _ = request(connection, "POST", "/v2/models/double/infer", infer_body(3))
            assert (status == 200) == (expected == 200)


def test_loads_under_load(server, connections):
    """Requests either succeed or say that the model is not there; none is lost."""
    stop, statuses = threading.Event(), []

    def send(connection: http.client.HTTPConnection) -> None:
        while not stop.is_set():
            statuses.append(request(connection, "POST", "/v2/models/double/infer", infer_body(2))[0])

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(send, connection) for connection in connections[:8]]
        control = connections[-1]
        for _ in range(3):
            assert request(control, "POST", "/v2/repository/models/double/unload")[0] == 200
            assert request(control, "POST", "/v2/repository/models/double/load")[0] == 200
        stop.set()
        for each in running:
            each.result(60)
    assert 200 in statuses and set(statuses) <= {200, 400, 404, 503}


def test_log_settings_are_those_of_all_processes(connections):
    for value in (1, 0):
        assert request(connections[value], "POST", "/v2/logging", {"log_verbose_level": value})[0] == 200
        for connection in connections:
            assert json.loads(request(connection, "GET", "/v2/logging")[1])["log_verbose_level"] == value


def test_tracing_is_rejected(connections):
    for connection in connections:
        status, reply = request(connection, "POST", "/v2/trace/setting", {"trace_level": ["TIMESTAMPS"]})
        assert status == 501 and b"--server-processes" in reply


def test_shared_memory_regions_are_those_of_all_processes(server, connections):
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=8)
    try:
        np.ndarray(1, np.int32, memory.buf)[:] = 21
        with grpc_client.InferenceServerClient(server.address("grpc")) as client:
            client.register_system_shared_memory("region", memory.name, 8)
        place = {"shared_memory_region": "region", "shared_memory_byte_size": 4}
        tensor = {"name": "IN", "shape": [1, 1], "datatype": "INT32", "parameters": place}
        for connection in connections:
            status, reply = request(connection, "POST", "/v2/models/double/infer", {"inputs": [tensor]})
            assert status == 200 and json.loads(reply)["outputs"][0]["data"] == [42]
        assert request(connections[0], "POST", "/v2/systemsharedmemory/unregister")[0] == 200
        for connection in connections:
            assert json.loads(request(connection, "GET", "/v2/systemsharedmemory/status")[1]) == []
    finally:
        memory.close()
        memory.unlink()


def test_the_response_cache_is_shared(server, connections):
    for connection in connections:
        status, reply = request(connection, "POST", "/v2/models/cached/infer", infer_body(5))
        assert status == 200 and json.loads(reply)["outputs"][0]["data"] == [10]
    metrics = server.metrics()
    label = '{model="cached",version="1"}'
    assert metrics[f"nv_cache_num_hits_per_model{label}"] == len(connections) - 1
    assert metrics[f"nv_inference_count{label}"] == 1


def test_responses_are_stored_for_all_processes(server):
    opened = Connections(server, "openai")
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 16, "temperature": 0}
    created = []
    for connection in opened.all[:4]:
        status, reply = request(connection, "POST", "/v1/responses", body | {"background": True})
        assert status == 200
        created.append(json.loads(reply)["id"])
    for name in created:
        wait_until(
            lambda name=name: (
                json.loads(request(opened.all[0], "GET", f"/v1/responses/{name}")[1])["status"]
                == "incomplete"
            )
        )
        for connection in opened.all:
            assert request(connection, "GET", f"/v1/responses/{name}")[0] == 200
    for connection in opened.all[:8]:
        status, reply = request(connection, "POST", "/v1/responses", body | {"stream": True})
        assert status == 200 and reply.count(b"event: response.completed") + reply.count(
            b"response.incomplete"
        )
    opened.close()


@pytest.mark.slow
def test_kill_9_of_a_front_end_process_ends_its_own_requests_only(server):
    """Run last: afterwards the server has another front-end process."""
    opened = Connections(server)
    killed = front_end(server)
    ports = set(server.ports.values())
    of_killed = {c.raddr.port for c in killed.net_connections("tcp") if c.laddr.port in ports and c.raddr}
    body = {**STREAM, "max_tokens": 200}
    started = threading.Barrier(len(opened.all) + 1, timeout=60)

    def stream(connection: http.client.HTTPConnection) -> bool:
        """Return whether the stream was complete."""
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        lines = [response.readline()]
        started.wait()
        try:
            lines += response.readlines()
        except (http.client.IncompleteRead, ConnectionError):
            return False
        return b"data: [DONE]\n" in lines

    with ThreadPoolExecutor(len(opened.all)) as pool:
        ports_of = [connection.sock.getsockname()[1] for connection in opened.all]
        results = [pool.submit(stream, connection) for connection in opened.all]
        started.wait()
        os.kill(killed.pid, signal.SIGKILL)
        complete = [result.result(120) for result in results]
    assert complete == [port not in of_killed for port in ports_of]
    opened.close()
    wait_until(
        lambda: server.gauge("vllm:num_requests_running") + server.gauge("vllm:num_requests_waiting") == 0
    )
    kinds = ("max", "free")
    blocks = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="%s",model="neso-pilot",version="1"}'
    wait_until(lambda: len({server.metrics()[blocks % kind] for kind in kinds}) == 1)
    wait_until(lambda: len(listening(server)) == 2)
    again = Connections(server)
    for connection in again.all:
        assert request(connection, "POST", "/v2/models/double/infer", infer_body(4))[0] == 200
        short = {"text_input": "def", "parameters": {"max_tokens": 2}}
        assert request(connection, "POST", f"/v2/models/{MODEL}/generate", short)[0] == 200
    again.close()


def listening(server: ServerProcess) -> set[int]:
    """Return the processes that listen on the HTTP port."""
    processes = [psutil.Process(server.process.pid), find_front_end(server)]
    return {each.pid for each in processes if each and server.ports["http"] in listening_ports(each)}


@pytest.mark.slow
def test_the_end_of_the_main_process_ends_all(tmp_path):
    with ServerProcess("--server-processes=3") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 3
        server.process.kill()
        wait_until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))


@pytest.mark.slow
def test_sigterm_drains_both_processes(tmp_path):
    environment = slow_environment(tmp_path, 0.02)
    with ServerProcess("--server-processes=2", environment=environment) as server:
        opened = Connections(server)
        body = {**STREAM, "max_tokens": 40}
        begun = threading.Barrier(len(opened.all) + 1, timeout=60)

        def stream(connection: http.client.HTTPConnection) -> bytes:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            response.readline()
            begun.wait()
            return response.read()

        with ThreadPoolExecutor(len(opened.all)) as pool:
            results = [pool.submit(stream, connection) for connection in opened.all]
            begun.wait()
            server.process.send_signal(signal.SIGTERM)
            rests = [result.result(60) for result in results]
        assert all(rest.endswith(b"data: [DONE]\n\n") for rest in rests)
        assert server.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--trace-config=level=TIMESTAMPS", "tracing is not supported with --server-processes"),
        ("--backend-config=llm,in-process=true", "not supported with --server-processes"),
    ],
)
def test_what_cannot_be_shared_is_refused_at_start(argument, message):
    with ServerProcess("--server-processes=2", argument) as server:
        assert server.process.wait(60) != 0 and message in server.output


@pytest.mark.slow
def test_rate_limits_are_those_of_all_processes():
    with ServerProcess("--server-processes=2", "--openai-requests-per-minute=10") as server:
        opened = Connections(server, "openai")
        body = {"model": MODEL, "prompt": "def", "max_tokens": 1}
        statuses = [request(c, "POST", "/v1/completions", body)[0] for c in opened.all]
        opened.close()
    assert sorted(statuses) == [200] * 10 + [429] * (len(statuses) - 10)
