"""Two servers that share a Redis, which stops and restarts while clients send requests."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from eventually import wait_until
from server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "response_cache"))

from redis_process import RedisProcess, needs_redis

pytest.importorskip("redis")
pytestmark = needs_redis

CONFIG = """
backend: "python"
response_cache { enable: true }
max_batch_size: 8
dynamic_batching { }
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""
CODE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * array)]) for array in arrays]
"""


@pytest.fixture
def redis(tmp_path):
    with RedisProcess(tmp_path) as process:
        yield process


@pytest.fixture
def serve(tmp_path, redis):
    """Return arguments of a server with the cache."""
    folder = tmp_path / "models" / "double" / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(CODE)
    (folder.parent / "config.pbtxt").write_text(CONFIG)
    return (
        f"--model-repository={tmp_path / 'models'}",
        f"--cache-config=redis,host=127.0.0.1,port={redis.port}",
        "--cache-config=redis,socket_timeout=60000",
        "--cache-config=redis,connect_timeout=60000",
    )


def send_request(server: ServerProcess, value: int) -> int:
    body = {"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [value]}]}
    status, response = server.post("/v2/models/double/infer", body)
    assert status == 200, response
    return response["outputs"][0]["data"][0]


def wait_for_more(server: ServerProcess, metric: str, count: int) -> None:
    """Wait until a counter has increased by the given amount."""
    before = server.gauge(metric)
    wait_until(lambda: server.gauge(metric) >= before + count)


def test_servers_share_the_cache(serve):
    with ServerProcess(*serve) as one, ServerProcess(*serve) as other:
        assert [send_request(one, n) for n in range(5)] == [0, 2, 4, 6, 8]
        wait_until(lambda: one.gauge("nv_cache_num_misses_per_model") == 5)
        assert [send_request(other, n) for n in range(5)] == [0, 2, 4, 6, 8]
        assert other.gauge("nv_cache_num_hits_per_model") == 5
        assert other.gauge("nv_inference_count") == 0


def test_redis_restart_fails_no_request(serve, redis):
    with ServerProcess(*serve) as server:
        stop = threading.Event()

        def client(first: int) -> int:
            requested = 0
            while not stop.is_set():
                value = first + requested % 20
                assert send_request(server, value) == 2 * value
                requested += 1
            return requested

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(client, 100 * n) for n in range(4)]
            wait_for_more(server, "nv_cache_num_hits_per_model", 20)
            redis.stop()
            wait_for_more(server, "nv_inference_count", 50)
            redis.start()
            wait_for_more(server, "nv_cache_num_hits_per_model", 20)
            stop.set()
            requested = sum(task.result() for task in clients)
        assert server.gauge("nv_inference_request_success") == requested
        before = server.gauge("nv_cache_num_hits_per_model")
        assert send_request(server, 100) == 200
        assert server.gauge("nv_cache_num_hits_per_model") == before + 1
        assert server.stop() == 0
        assert server.output.count("does not respond, responses are not cached") == 1
        assert server.output.count("responds again") == 1
