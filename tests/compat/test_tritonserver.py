"""Programs written for Triton's `tritonserver` and `tritonfrontend`, run with Neso's replacements."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import queue
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from neso.compat import tritonserver
from neso.server.options import RateLimitMode, ResourceLimit

ECHO = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            outputs = [
                pb_utils.Tensor(tensor.name().replace("input", "output"), tensor.as_numpy())
                for tensor in request.inputs()
            ]
            outputs.append(pb_utils.Tensor("parameters", np.array([request.parameters()], np.object_)))
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
ECHO_CONFIG = """
backend: "python"
input [
  { name: "text_input" data_type: TYPE_STRING dims: [ -1, -1 ] optional: true },
  { name: "fp16_input" data_type: TYPE_FP16 dims: [ -1, -1 ] optional: true },
  { name: "bool_input" data_type: TYPE_BOOL dims: [ -1, -1 ] optional: true }
]
output [
  { name: "text_output" data_type: TYPE_STRING dims: [ -1, -1 ] },
  { name: "fp16_output" data_type: TYPE_FP16 dims: [ -1, -1 ] },
  { name: "bool_output" data_type: TYPE_BOOL dims: [ -1, -1 ] },
  { name: "parameters" data_type: TYPE_STRING dims: [ 1 ] }
]
"""
WORDS = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            sender = request.get_response_sender()
            for word in text.split():
                if sender.is_cancelled():
                    error = pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED)
                    sender.send(pb_utils.InferenceResponse(error=error))
                    break
                sender.send(pb_utils.InferenceResponse([
                    pb_utils.Tensor("text_output", np.array([word], np.object_))
                ]))
                time.sleep(0.001)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
WORDS_CONFIG = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""


@pytest.fixture
def repository(tmp_path):
    for name, code, config in (("echo", ECHO, ECHO_CONFIG), ("words", WORDS, WORDS_CONFIG)):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        (tmp_path / "models" / name / "config.pbtxt").write_text(config)
        (tmp_path / "models" / name / "1" / "model.py").write_text(code)
    return tmp_path / "models"


@pytest.fixture
def options(repository):
    return tritonserver.Options(
        server_id="Test",
        model_repository=str(repository),
        model_control_mode=tritonserver.ModelControlMode.EXPLICIT,
        startup_models=["*"],
        exit_timeout=2,
    )


@pytest.fixture
def server(options):
    with tritonserver.Server(options) as server:
        yield server


def run(*arguments, cwd, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, **options)


SCRIPT = """
import asyncio
import queue
import sys

import numpy
import tritonserver
from tritonserver import Model, Server

server = tritonserver.Server(model_repository=sys.argv[1], log_error=True)
server.start(wait_until_ready=True)
assert server.ready() and server.live()
print(server.metadata()["name"], sorted(server.models()))

model = server.model("echo")
for response in model.infer(
    inputs={"text_input": [["x", "y"]], "fp16_input": numpy.array([[1, 2]], numpy.float16)}, raise_on_error=True
):
    print(response.outputs["text_output"].to_string_array(), numpy.from_dlpack(response.outputs["fp16_output"]))

text = ""
for response in server.model("words").infer(inputs={"text_input": ["so it goes"]}):
    if "text_output" in response.outputs:
        text += response.outputs["text_output"].to_string_array()[0]
    if response.final:
        break
print(text)

request = server.model("words").create_request()
request.inputs["text_input"] = tritonserver.Tensor.from_string_array(["one two"])
request.request_id = "mine"
request.response_queue = queue.SimpleQueue()
list(server.model("words").infer(request))
while True:
    response = request.response_queue.get()
    print(response.request_id, response.model, response.final)
    if response.final:
        break


async def main():
    async for response in model.async_infer(inputs={"bool_input": [[True, False]]}):
        print(numpy.from_dlpack(response.outputs["bool_output"]))


asyncio.run(main())
try:
    model.infer(inputs={"no_input": [1]})
except tritonserver.InvalidArgumentError as error:
    assert isinstance(error, tritonserver.TritonError)
    print("refused")
print(model.transaction_properties() is tritonserver.ModelTxnPropertyFlag.ONE_TO_ONE)
server.stop()
"""
EXPECTED = """triton [('echo', 1), ('words', 1)]
[['x' 'y']] [[1. 2.]]
soitgoes
mine {'name': 'words', 'version': 1, 'state': None} False
mine {'name': 'words', 'version': 1, 'state': None} False
mine {'name': 'words', 'version': 1, 'state': None} True
[[ True False]]
refused
True
"""
FRONTENDS = """
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonserver
from tritonfrontend import KServeGrpc, KServeHttp, Metrics
import sys, socket, urllib.request

def free():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

def ask(module, port):
    client = module.InferenceServerClient(url=f"localhost:{port}")
    data = np.array([["Roger Roger"]], dtype=object)
    inputs = [module.InferInput("text_input", data.shape, "BYTES")]
    inputs[0].set_data_from_numpy(data)
    result = client.infer("echo", inputs=inputs).as_numpy("text_output")
    client.close()
    return result

http, grpc, metrics = free(), free(), free()
server = tritonserver.Server(tritonserver.Options(model_repository=sys.argv[1])).start(wait_until_ready=True)
with KServeHttp(server, KServeHttp.Options(port=http)) as http_service:
    grpc_service = KServeGrpc(server, KServeGrpc.Options(port=grpc))
    grpc_service.start()
    print(ask(httpclient, http), ask(grpcclient, grpc))
    with Metrics(server, Metrics.Options(port=metrics)):
        text = urllib.request.urlopen(f"http://localhost:{metrics}/metrics").read().decode()
        print("nv_inference_request_success" in text)
    grpc_service.stop()
    server.stop()
    for module, port in ((httpclient, http), (grpcclient, grpc)):
        try:
            ask(module, port)
        except Exception as error:
            print("refused")
"""


def test_unchanged_script_runs(repository, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("-m", "neso.compat", "script.py", str(repository), cwd=tmp_path)
    assert (done.stdout, done.returncode) == (EXPECTED, 0), done.stderr


def test_script_may_install_the_packages(repository, tmp_path):
    (tmp_path / "script.py").write_text("import neso.compat\nneso.compat.install()\n" + SCRIPT)
    done = run("script.py", str(repository), cwd=tmp_path)
    assert (done.stdout, done.returncode) == (EXPECTED, 0), done.stderr


def test_frontends_in_a_script(repository, tmp_path):
    (tmp_path / "frontends.py").write_text(FRONTENDS)
    done = run("-m", "neso.compat", "-m", "frontends", str(repository), cwd=tmp_path)
    assert done.stdout == "[[b'Roger Roger']] [[b'Roger Roger']]\nTrue\nrefused\nrefused\n", done.stderr


def test_installed_package_is_not_hidden(tmp_path):
    (tmp_path / "tritonserver.py").write_text("print('the real one')\n")
    (tmp_path / "script.py").write_text("import tritonserver\nprint(tritonserver.__name__)\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "PATH": ""}
    refused = run("-m", "neso.compat", "script.py", cwd=tmp_path, env=environment)
    assert refused.returncode == 2 and "'tritonserver' is installed" in refused.stderr
    replaced = run("-m", "neso.compat", "--replace", "script.py", cwd=tmp_path, env=environment)
    assert replaced.stdout == "neso.compat.tritonserver\n", replaced.stderr
    plain = run("script.py", cwd=tmp_path, env=environment)
    assert plain.stdout == "the real one\ntritonserver\n"


def test_arguments_and_exit_status_are_passed_through(tmp_path):
    (tmp_path / "beside.py").write_text("value = 5\n")
    (tmp_path / "script.py").write_text(
        "import sys, beside\nprint(sys.argv, __name__)\nsys.exit(beside.value)\n"
    )
    done = run("-m", "neso.compat", "script.py", "-m", "--replace", "x", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("['script.py', '-m', '--replace', 'x'] __main__\n", 5), (
        done.stderr
    )


def test_all_public_names_exist():
    for name in tritonserver.__all__:
        assert getattr(tritonserver, name)


def test_calls_require_a_running_server(options):
    server = tritonserver.Server(options)
    calls = (
        server.ready,
        server.live,
        server.metadata,
        server.models,
        server.stop,
        lambda: server.model("echo"),
    )
    for call in calls:
        with pytest.raises(tritonserver.InvalidArgumentError, match="Server not started"):
            call()
    server.start()
    with pytest.raises(tritonserver.InvalidArgumentError, match="already started"):
        server.start()
    server.stop()
    for call in calls:
        with pytest.raises(tritonserver.InvalidArgumentError, match="Server not started"):
            call()
    server.start(wait_until_ready=True)  # a second time, as with Triton
    assert server.ready()
    server.stop()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"server_id": 1}, TypeError),
        ({"model_repository": 1}, TypeError),
        ({"model_repository": [1]}, TypeError),
        ({"exit_timeout": -1}, TypeError),
        ({"model_repository": None}, tritonserver.InvalidArgumentError),
        ({"model_repository": []}, tritonserver.InvalidArgumentError),
        ({"model_repository": "/nonexistent"}, tritonserver.InternalError),
        ({"cache_config": {"redis": {"port": "x"}}}, tritonserver.InvalidArgumentError),
        ({"cache_config": {"other": {"a": 1}}}, tritonserver.TritonError),
    ],
)
def test_invalid_options_are_rejected(options, wrong, error):
    for name, value in wrong.items():
        setattr(options, name, value)
    with pytest.raises(error):
        tritonserver.Server(options).start()


def test_options_are_converted(repository):
    options = tritonserver.Options(
        [str(repository)],
        strict_model_config=True,
        startup_models=["words"],
        cache_config={"local": {"size": 1000}},
        backend_configuration={"python": {"number": 1}},
        rate_limiter_mode=tritonserver.RateLimitMode.EXEC_COUNT,
        rate_limiter_resources=[
            tritonserver.RateLimiterResource("R1", 4, -1),
            tritonserver.RateLimiterResource("R2", 2, 0),
        ],
        strict_readiness=False,
        exit_timeout=3,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = options.to_neso()
    assert found.model_repository == (str(repository),) and found.server_id == "triton"
    assert found.disable_auto_complete_config and not found.strict_readiness and found.exit_timeout == 3
    assert found.response_cache_size == 1000 and found.backend_config == {"python": {"number": "1"}}
    assert found.rate_limit is RateLimitMode.EXECUTION_COUNT
    assert found.rate_limit_resources == (ResourceLimit("R1", 4), ResourceLimit("R2", 2, 0))
    redis = tritonserver.Options(str(repository), cache_config={"redis": {"host": "h", "port": 7}}).to_neso()
    assert (redis.redis_cache.host, redis.redis_cache.port) == ("h", 7)
    assert found.startup_models == ()  # the mode is not EXPLICIT


def test_options_without_effect_cause_a_warning(repository):
    options = tritonserver.Options(
        str(repository),
        pinned_memory_pool_size=0,
        host_policies={"gpu_0": {"numa-node": "0"}},
        model_load_device_limits=[
            tritonserver.ModelLoadDeviceLimit(tritonserver.InstanceGroupKind.GPU, 0, 0.5)
        ],
    )
    with pytest.warns(UserWarning, match="has no effect") as caught:
        options.to_neso()
    assert sorted(str(w.message).split(": ")[1].split()[0] for w in caught) == [
        "host_policies",
        "model_load_device_limits",
        "pinned_memory_pool_size",
    ]


def test_model_that_fails_to_load(options, repository):
    (repository / "words" / "1" / "model.py").write_text("raise ValueError('bad')")
    with pytest.raises(tritonserver.InternalError, match="bad"):
        tritonserver.Server(options).start()
    options.exit_on_error = False
    with pytest.raises(tritonserver.UnavailableError, match="bad"):
        tritonserver.Server(options).start(wait_until_ready=True)
    server = tritonserver.Server(options).start()
    assert not server.ready() and server.model("echo").ready()
    assert server.models()["words", 1].state == "UNAVAILABLE" and "bad" in server.models()["words", 1].reason
    server.stop()


def test_start_timeout(options, repository):
    (repository / "words" / "1" / "model.py").write_text("import time\ntime.sleep(2)\n" + WORDS)
    with pytest.raises(tritonserver.UnavailableError, match="Timeout"):
        tritonserver.Server(options).start(wait_until_ready=True, timeout=0.05)


def test_model_metadata_and_statistics(server):
    models = server.models()
    assert set(models) == {("echo", 1), ("words", 1)} == set(server.models(exclude_not_ready=True))
    assert repr(models["echo", 1]) == "{'name': 'echo', 'version': 1, 'state': 'READY'}"
    assert models["words"].version == -1 and models["words"].ready()
    for key in ("nope", ("echo", 7)):
        with pytest.raises(KeyError, match="Unknown Model"):
            models[key]
    words = models["words"]
    assert words.transaction_properties() is tritonserver.ModelTxnPropertyFlag.DECOUPLED
    assert words.batch_properties() is tritonserver.ModelBatchFlag.UNKNOWN
    assert words.metadata()["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]
    assert words.config()["backend"] == "python"
    assert words.statistics()["model_stats"][0]["name"] == "words"
    missing = server.model("nope")
    assert not missing.ready()
    with pytest.raises(tritonserver.NotFoundError):
        missing.metadata()
    with pytest.raises(tritonserver.NotFoundError):
        missing.infer(inputs={})


def test_load_and_unload(server):
    server.unload("echo", wait_until_unloaded=True, timeout=60)
    assert server.models()["echo", 1].state == "UNAVAILABLE" and not server.model("echo").ready()
    config = {
        "backend": "python",
        "max_batch_size": 4,
        "input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1]}],
        "output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]}],
    }
    model = server.load("echo", {"config": json.dumps(config)})
    assert model.batch_properties() is tritonserver.ModelBatchFlag.FIRST_DIM
    files = {"config": json.dumps(config), "file:1/model.py": ECHO.encode()}
    (response,) = server.load("uploaded", files).infer(inputs={"text_input": [["a"]]})
    assert response.outputs["text_output"].to_bytes_array().tolist() == [[b"a"]]
    server.unload(model)
    with pytest.raises(tritonserver.InvalidArgumentError, match="load parameter 'other'"):
        server.load("echo", {"other": 1})


def test_register_a_repository(server, repository, tmp_path):
    (tmp_path / "more").mkdir()
    (repository / "words").rename(tmp_path / "more" / "other")
    server.register_model_repository(str(tmp_path / "more"), {"other": "renamed"})
    assert ("renamed", -1) in server.models()
    assert server.load("renamed").ready()
    server.unregister_model_repository(str(tmp_path / "more"))


def test_requests(server):
    echo = server.model("echo")
    parameters = {"int": 0, "float": 0.5, "bool": False, "string": "test"}
    array = np.random.rand(1, 100).astype(np.float16)
    (response,) = echo.infer(inputs={"fp16_input": array}, parameters=parameters, output_memory_type="cpu")
    output = response.outputs["fp16_output"]
    assert json.loads(response.outputs["parameters"].to_string_array()[0]) == parameters
    assert (
        output.memory_type is tritonserver.MemoryType.CPU and output.data_type is tritonserver.DataType.FP16
    )
    assert np.array_equal(np.from_dlpack(output), array) and output.data_ptr == array.ctypes.data
    assert (response.model.name, response.model.version, response.final, response.error) == (
        "echo",
        1,
        True,
        None,
    )
    for wrong in ({"test": 1}, None):
        with pytest.raises(tritonserver.InvalidArgumentError):
            echo.infer(inputs={"fp16_input": array}, parameters={"invalid": wrong})
    with pytest.raises(tritonserver.InvalidArgumentError):
        echo.infer(inputs={"fp16_input": array}, output_memory_type="unsupported")
    request = tritonserver.InferenceRequest(echo, flags=1, correlation_id="c", inputs={"text_input": [["a"]]})
    assert (request.to_neso().sequence_id, request.to_neso().sequence_start) == ("c", True)
    (response,) = echo.infer(request)
    assert response.outputs["text_output"].to_string_array().tolist() == [["a"]]


def test_responses_are_readable_after_stop(options):
    server = tritonserver.Server(options).start()
    responses = server.model("words").infer(inputs={"text_input": ["a b"]})
    server.stop()
    first, second, last = responses
    assert first.model.version == 1 and second.outputs["text_output"].to_string_array().tolist() == ["b"]
    assert last.final and not last.outputs


def test_cancel(server):
    responses = server.model("words").infer(inputs={"text_input": ["word " * 2000]}, raise_on_error=False)
    assert next(responses).outputs["text_output"].to_string_array()[0] == "word"
    responses.cancel()
    errors = [response.error for response in responses]
    assert len(errors) < 2000 and isinstance(errors[-2], tritonserver.CancelledError)


async def test_async_with_a_queue(server):
    responses: asyncio.Queue[tritonserver.InferenceResponse] = asyncio.Queue()
    iterator = server.model("words").async_infer(inputs={"text_input": ["a b"]}, response_queue=responses)
    assert [r.final async for r in iterator] == [False, False, True]
    assert [responses.get_nowait().final for _ in range(3)] == [False, False, True]
    with pytest.raises(tritonserver.InvalidArgumentError):
        server.model("words").async_infer(inputs={"text_input": ["a"]}, response_queue=queue.SimpleQueue())


def test_outputs_use_the_memory_allocator(server):
    given = []

    class Allocator(tritonserver.MemoryAllocator):
        def allocate(self, size, memory_type, memory_type_id, tensor_name):
            given.append((tensor_name, np.zeros(size + 8, np.uint8)))
            return tritonserver.MemoryBuffer.from_dlpack(given[-1][1])

    inputs = {"fp16_input": np.array([[1, 2]], np.float16), "text_input": [["a"]]}
    (response,) = server.model("echo").infer(inputs=inputs, output_memory_allocator=Allocator())
    memory = dict(given)
    output = response.outputs["fp16_output"]
    assert output.data_ptr == memory["fp16_output"].ctypes.data and output.size == 4
    assert np.from_dlpack(output).tolist() == [[1, 2]]
    assert bytes(memory["text_output"][:5]) == b"\x01\0\0\0a"
    assert response.outputs["text_output"].to_string_array().tolist() == [["a"]]

    class TooSmall(tritonserver.MemoryAllocator):
        def allocate(self, size, memory_type, memory_type_id):
            return tritonserver.default_memory_allocators[memory_type].allocate(1, memory_type, 0)

    with pytest.raises(tritonserver.InvalidArgumentError, match="gave 1 bytes of 4"):
        list(server.model("echo").infer(inputs=inputs, output_memory_allocator=TooSmall()))


def test_outputs_are_readable_by_pointer(server):
    def text(response: tritonserver._api._response.InferenceResponse) -> str:
        tensor = response.outputs["text_output"]
        return ctypes.string_at(tensor.data_ptr + 4, tensor.size - 4).decode()

    assert tritonserver._api._response.InferenceResponse is tritonserver.InferenceResponse
    inputs = {"text_input": [["some words"]], "bool_input": np.bool_([[True]])}
    (response,) = server.model("echo").infer(server.model("echo").create_request(inputs=inputs))
    assert text(response) == "some words"
    pointer = ctypes.cast(response.outputs["bool_output"].data_ptr, ctypes.POINTER(ctypes.c_bool))
    assert pointer[0] is True


def test_tensors_over_buffers():
    array = np.arange(6, dtype=np.float32)
    buffer = tritonserver.MemoryBuffer.from_dlpack(array)
    tensor = tritonserver.Tensor(tritonserver.DataType.FP32, [2, 3], buffer)
    view = np.from_dlpack(tensor)
    assert (
        view.tolist() == [[0, 1, 2], [3, 4, 5]] and view.ctypes.data == array.ctypes.data == tensor.data_ptr
    )
    del array, buffer
    assert view.tolist() == [[0, 1, 2], [3, 4, 5]]
    tensor.shape = [3, 2]
    assert view.shape == (2, 3) and np.from_dlpack(tensor).shape == (3, 2) == tensor.shape
    with pytest.raises(tritonserver.InvalidArgumentError, match="cannot take shape"):
        tensor.shape = [7]
    with pytest.raises(tritonserver.InvalidArgumentError, match="byte size"):
        tritonserver.Tensor(tritonserver.DataType.FP64, [2, 3], tensor.memory_buffer)
    text = tritonserver.Tensor.from_string_array(["a", "bc"])
    again = tritonserver.Tensor(tritonserver.DataType.BYTES, [2], text.memory_buffer)
    assert isinstance(text, tritonserver.Tensor) and again.to_string_array().tolist() == ["a", "bc"]
    assert tritonserver.Tensor.from_dlpack(view).to_host().data_type is tritonserver.DataType.FP32
    assert [t.value for t in tritonserver.DataType] == list(range(15))


def test_metrics(server, options):
    family = tritonserver.MetricFamily(tritonserver.MetricKind.GAUGE, "compat_gauge", "A gauge")
    metric = tritonserver.Metric(family, {"label": "x"})
    metric.increment(2)
    metric.set_value(7)
    assert (metric.value, metric.kind) == (7, tritonserver.MetricKind.GAUGE)
    with tritonserver.Server(options) as second:
        for each in (server, second):
            assert 'compat_gauge{label="x"} 7' in each.metrics(tritonserver.MetricFormat.PROMETHEUS)
    with pytest.raises(tritonserver.UnsupportedError):
        metric.observe(1)
    with pytest.raises(tritonserver.AlreadyExistsError):
        tritonserver.MetricFamily(tritonserver.MetricKind.COUNTER, "compat_gauge", "A gauge")


def test_server_metrics(options):
    options.cpu_metrics = False
    options.metrics_configuration = {"": {"summary_latencies": "true"}}
    with tritonserver.Server(options) as server:
        list(server.model("echo").infer(inputs={"text_input": [["x"]]}))
        text = server.metrics()
    assert "nv_inference_request_summary_us" in text
    assert "nv_cpu_utilization" not in text


def test_logs(options, tmp_path, capfd):
    before = (logging.getLogger("neso").level, list(logging.getLogger("neso").handlers))
    options.log_file, options.log_verbose = str(tmp_path / "log"), 1
    with tritonserver.Server(options):
        pass
    assert "loaded version 1 of model 'echo'" in (tmp_path / "log").read_text()
    options.log_file, options.log_verbose, options.log_info = None, 0, True
    options.log_format = tritonserver.LogFormat.ISO8601
    with tritonserver.Server(options):
        pass
    assert re.search(r'^\d{4}-\d\d-\d\dT[\d:]+Z I \d+ .*"loaded version 1', capfd.readouterr().err)
    options.log_info = False
    with tritonserver.Server(options):
        logging.getLogger("neso.test").error("hidden")
    assert "hidden" not in capfd.readouterr().err
    assert (logging.getLogger("neso").level, list(logging.getLogger("neso").handlers)) == before
