"""Python models in a running core."""

from __future__ import annotations

import asyncio
import json
import sys
import threading

import numpy as np
import pytest
from core_requests import collect, send_request, send_slow_request
from repository_builder import IDENTITY, IDENTITY_TENSORS, REPEAT, REPEAT_TENSORS

from neso.server.errors import ErrorCode, ServerError
from neso.server.inference_request import InferenceRequest
from neso.server.log import log_settings
from neso.server.tensor import Tensor

HEAD = """
import asyncio, gc, json, threading, time, uuid
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

def answer(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))])

def tell(value):
    text = np.array([json.dumps(value)], np.object_)
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)])

class TritonPythonModel:
"""
TEXT_OUT = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] optional: true }
output { name: "OUT" data_type: TYPE_STRING dims: [ -1 ] }
"""
DECOUPLED = IDENTITY_TENSORS + "model_transaction_policy { decoupled: true }"


async def error_of(model) -> ServerError:
    (response,) = await asyncio.wait_for(collect(send_slow_request(model)), 60)
    assert response.error is not None and response.final
    return response.error


async def test_initialize_arguments(serve):
    code = (
        HEAD
        + """
    def initialize(self, args):
        self.args = dict(args, dir=pb_utils.get_model_dir())
    def execute(self, requests):
        return [tell(self.args)]
"""
    )
    model = await serve(code, TEXT_OUT + "parameters { key: 'k' value { string_value: 'v' } }")
    (response,) = await collect(send_request(model))
    args = json.loads(response.output("OUT").strings()[0])
    assert (args["model_name"], args["model_version"]) == ("model", "1")
    assert (args["model_instance_kind"], args["model_instance_device_id"]) == ("CPU", "0")
    assert args["dir"] == args["model_repository"] + "/1"
    config = json.loads(args["model_config"])
    assert config["parameters"]["k"]["string_value"] == "v"
    assert config["output"][0]["data_type"] == "TYPE_STRING"


async def test_request_attributes(serve):
    code = (
        HEAD
        + """
    def execute(self, requests):
        (r,) = requests
        return [tell([r.request_id(), r.correlation_id(), r.requested_output_names(), r.model_name(), r.flags(),
                      r.timeout(), json.loads(r.parameters()), r.is_cancelled(), len(r.inputs()),
                      pb_utils.get_input_tensor_by_name(r, "NO") is None])]
"""
    )
    model = await serve(code, TEXT_OUT)
    request = InferenceRequest(
        "model",
        {},
        id="q",
        parameters={"p": 1, "b": True},
        timeout_us=5,
        sequence_id=9,
        sequence_start=True,
        sequence_end=True,
    )
    (response,) = await collect(model.submit(request))
    assert json.loads(response.output("OUT").strings()[0]) == [
        "q", 9, ["OUT"], "model", 3, 5, {"p": 1, "b": True}, False, 0, True,
    ]  # fmt: skip


async def test_writing_to_inputs_does_not_change_the_request(serve):
    code = (
        HEAD
        + """
    def execute(self, requests):
        array = requests[0].inputs()[0].as_numpy()
        array += 1
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)])]
"""
    )
    model = await serve(code)
    tensor = Tensor.from_wire("IN", Tensor.from_numpy("", np.zeros(1, np.float32)).datatype, (2,), bytes(8))
    (response,) = await collect(model.submit(InferenceRequest("model", {"IN": tensor})))
    assert response.output("OUT").array.tolist() == [1, 1]
    assert tensor.array.tolist() == [0, 0]


async def test_string_outputs_are_converted_to_bytes(serve):
    code = (
        HEAD
        + """
    def execute(self, requests):
        out = np.array([b"a", "ü", 3], np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)], parameters={"n": 3})]
"""
    )
    (response,) = await collect(send_request(await serve(code, TEXT_OUT)))
    assert response.output("OUT").array.tolist() == [b"a", "ü".encode(), b"3"]
    assert response.parameters == {"n": 3}


async def test_undeclared_outputs_are_dropped(serve, caplog):
    code = (
        HEAD
        + """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("OUT", np.array([1], np.int64)), pb_utils.Tensor("MORE", np.array([1]))])]
"""
    )
    model = await serve(code)
    for _ in range(2):
        (response,) = await collect(send_slow_request(model))
        assert [(t.name, t.datatype.value) for t in response.outputs] == [("OUT", "INT64")]
    assert caplog.text.count("has datatype INT64, but the configuration declares FP32") == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('bad day')", "model instance 'model_0_0', message: ValueError: bad day"),
        ("raise pb_utils.TritonModelException('as told')", "message: as told"),
        ("return []", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0"),
        ("return [answer(1), answer(2)]", "InferenceResponse(s) size is:2"),
        ("return None", "released a request without a final response"),
        ("return 7", "Expected a list in the execute return, found type 'int'"),
        ("return ['x']", "found type 'str'"),
        ("return [None]", "released a request without a final response"),
        ("return [pb_utils.InferenceResponse([3])]", "must contain pb_utils.Tensor objects, got int"),
        ("return [pb_utils.InferenceResponse(error='x')]", "must be a pb_utils.TritonError"),
        ("requests[0].set_release_flags(2)", "iterative_sequence: true"),
        ("requests[0].set_release_flags(4)", "Unsupported flag provided: 4"),
        ("pb_utils.Tensor('OUT', [1])", "must be made from a numpy array"),
        ("pb_utils.Tensor('OUT', np.array([1j]))", "no KServe datatype"),
    ],
)
async def test_error_in_execute_fails_only_the_request(serve, body, message):
    model = await serve(HEAD + f"    def execute(self, requests):\n        {body}\n")
    for _ in range(2):  # the instance continues
        error = await error_of(model)
        assert message in error.message and error.code is ErrorCode.INTERNAL
    assert model.ready() and model.statistics.fail.count == 2
    assert model.statistics.failures["BACKEND"] == 2


async def test_error_codes_are_preserved(serve):
    code = (
        HEAD
        + """
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND))]
"""
    )
    error = await error_of(await serve(code))
    assert (error.message, error.code) == ("no", ErrorCode.NOT_FOUND)


async def test_async_execute(serve):
    code = (
        HEAD
        + """
    async def execute(self, requests):
        await asyncio.sleep(0.001)
        return [answer(1)]
"""
    )
    (response,) = await collect(send_slow_request(await serve(code)))
    assert response.error is None


async def test_async_decoupled_requests_run_concurrently(serve):
    code = (
        HEAD
        + """
    def initialize(self, args):
        self.waiting = []
    async def execute(self, requests):
        sender = requests[0].get_response_sender()
        self.waiting.append(asyncio.Event())
        if len(self.waiting) == 3:
            for event in self.waiting:
                event.set()
        await self.waiting[-1].wait() if len(self.waiting) < 3 else None
        sender.send(answer(1), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
    )
    model = await serve(code, DECOUPLED)
    streams = [send_slow_request(model) for _ in range(3)]
    for responses in await asyncio.wait_for(asyncio.gather(*map(collect, streams)), 60):
        assert len(responses) == 1 and responses[0].final and not responses[0].error


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_decoupled_errors(serve, kind):
    model = await serve(
        HEAD + f"    {kind} execute(self, requests):\n        raise KeyError('k')\n", DECOUPLED
    )
    assert "message: KeyError: 'k'" in (await error_of(model)).message
    model = await serve(
        HEAD + f"    {kind} execute(self, requests):\n        return [answer(1)]\n", DECOUPLED
    )
    assert "must return None" in (await error_of(model)).message


@pytest.mark.parametrize(
    "body",
    ["pass", "requests[0].get_response_sender()", "requests[0].get_response_sender().send(answer(1))"],
)
async def test_released_request_without_response_fails(serve, body):
    model = await serve(HEAD + f"    def execute(self, requests):\n        {body}\n", DECOUPLED)
    responses = await asyncio.wait_for(collect(send_slow_request(model)), 60)
    assert responses[-1].error is not None
    assert "without a final response" in responses[-1].error.message


async def test_unload_fails_requests_with_a_kept_sender(serve):
    code = (
        HEAD
        + """
    def initialize(self, args):
        self.senders = []
    def execute(self, requests):
        self.senders.append(requests[0].get_response_sender())
"""
    )
    model = await serve(code, DECOUPLED)
    stream = send_slow_request(model)
    await model.unload(0.05)
    (response,) = await asyncio.wait_for(collect(stream), 60)
    assert response.error is not None and "did not end in time" in response.error.message


async def test_sender_validates_its_arguments(serve):
    code = (
        HEAD
        + """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        said = []
        for args in [(), (3,), (answer(1), 7)]:
            try:
                sender.send(*args)
            except (pb_utils.TritonModelException, TypeError) as error:
                said.append(str(error))
        sender.send(tell(said), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        try:
            sender.send(answer(1))
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_error(error.message())
"""
    )
    model = await serve(code, TEXT_OUT + "model_transaction_policy { decoupled: true }")
    (response,) = await collect(send_request(model))
    errors = json.loads(response.output("OUT").strings()[0])
    assert len(errors) == 3 and "flag is set to zero" in errors[0] and "Unsupported flag" in errors[2]
    assert errors[1] == "response must be a pb_utils.InferenceResponse, got int"


async def test_sender_without_decoupling(serve):
    code = (
        HEAD
        + """
    def execute(self, requests):
        sender = requests[0].get_response_sender()
        kind = requests[0].inputs()[0].as_numpy()[0]
        if kind == 0:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        sender.send(answer(1))
        if kind == 2:
            sender.send(answer(2))
        if kind == 3:
            return [answer(3)]
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return [None]
"""
    )
    model = await serve(code)
    for kind in (1, 2, 3):  # the client has its response before the model fails
        (response,) = await collect(send_request(model, IN=np.array([kind], np.float32)))
        assert response.final and response.output("OUT").array.tolist() == [1]
    (response,) = await collect(send_request(model, IN=np.array([0], np.float32)))
    assert response.error is not None
    assert "cannot send complete final before sending a response" in response.error.message


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_responses_after_execute_has_returned_none(serve, kind):
    code = (
        HEAD
        + f"""
    def answer_later(self, senders, released):
        released.wait()
        for number, sender in enumerate(senders):
            sender.send(answer(number), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    {kind} execute(self, requests):
        senders = [request.get_response_sender() for request in requests]
        released = threading.Event()
        threading.Thread(target=self.answer_later, args=(senders, released)).start()
        threading.Timer(0.05, released.set).start()
"""
    )
    model = await serve(code)
    for _ in range(2):
        (response,) = await asyncio.wait_for(collect(send_slow_request(model)), 60)
        assert response.error is None and response.output("OUT").array.tolist() == [0]


# Each execution returns once two run concurrently.
MEETING = """
    def meet(self):
        folder = Path(pb_utils.get_model_dir())
        (folder / f"here_{uuid.uuid4()}").touch()
        end = time.monotonic() + 60
        while len(list(folder.glob("here_*"))) < 2:
            assert time.monotonic() < end, "the other one waits for this one's end"
            time.sleep(0.005)
"""


async def test_instances_run_concurrently(serve):
    code = (
        HEAD
        + MEETING
        + """
    def initialize(self, args):
        self.name = args["model_instance_name"]
    def execute(self, requests):
        self.meet()
        return [tell(self.name)]
"""
    )
    model = await serve(code, TEXT_OUT + "instance_group { count: 2 }")
    streams = [send_request(model), send_request(model)]
    names = {(await collect(stream))[0].output("OUT").strings()[0] for stream in streams}
    assert names == {'"model_0_0"', '"model_0_1"'}


async def test_finalize_runs_and_threads_end(serve, tmp_path):
    code = (
        HEAD
        + f"""
    def execute(self, requests):
        return [answer(1)]
    def finalize(self):
        open({str(tmp_path / "ended")!r}, "w").close()
"""
    )
    model = await serve(code)
    await model.unload(1)
    assert (tmp_path / "ended").exists()
    for thread in threading.enumerate():
        if thread.name.startswith("model-model"):
            thread.join(60)
            assert not thread.is_alive()


async def test_model_imports_its_own_file_by_name(serve):
    code = (
        HEAD
        + """
    value = 3
    def execute(self, requests):
        import model
        return [tell(model.TritonPythonModel.value)]
"""
    )
    (response,) = await collect(send_request(await serve(code, TEXT_OUT)))
    assert response.error is None, response.error
    assert response.output("OUT").strings() == ["3"]


async def test_models_have_isolated_modules(serve):
    code = (
        "import lib.deep, random\nfrom helper import VALUE\nfrom .helper import VALUE as SAME\n"
        "from lib import other\nfrom bare.inner import INNER\n"
        + HEAD
        + """
    def execute(self, requests):
        def answer():
            import late
            late.COUNT += 1
            values = [VALUE, SAME, lib.deep.DEEP, other.OTHER, INNER, late.LATE, late.COUNT]
            sender.send(tell(values), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        sender = requests[0].get_response_sender()
        threading.Thread(target=answer).start()
        assert random.random() < 1
"""
    )
    decoupled = TEXT_OUT + "model_transaction_policy { decoupled: true }"
    models = [
        await serve(
            code,
            decoupled,
            {
                "helper.py": f"VALUE = {i}",
                "late.py": f"LATE = {i}\nCOUNT = 0",
                "lib/__init__.py": "",
                "lib/deep.py": "from .other import OTHER as DEEP",
                "lib/other.py": "from helper import VALUE as OTHER",
                "bare/inner.py": f"INNER = {i}",
                "random/weights.txt": "a folder that is no module",
            },
        )
        for i in range(3)
    ]
    for turn in (1, 2, 3):
        streams = [send_request(model) for model in models]
        for i, stream in enumerate(streams):
            (response,) = await collect(stream)
            assert response.error is None, response.error
            assert json.loads(response.output("OUT").strings()[0]) == [i, i, i, i, i, i, turn]
    before = [name for name in sys.modules if name.startswith("neso_python_model_model_")]
    await models[0].unload(1)
    after = [name for name in sys.modules if name.startswith("neso_python_model_model_")]
    assert len(after) == len(before) * 2 // 3
    assert not {"helper", "late", "lib"} & set(sys.modules)


async def test_arbitrary_model_and_file_names(serve):
    model = await serve(
        HEAD + "    def execute(self, requests):\n        return [answer(1)]\n",
        IDENTITY_TENSORS + 'default_model_filename: "other.py"',
        {"other.py": HEAD + "    def execute(self, requests):\n        return [answer(2)]\n"},
    )
    (response,) = await collect(send_slow_request(model))
    assert response.output("OUT").array.tolist() == [2]


async def test_statistics_of_a_stream(serve):
    model = await serve(REPEAT, REPEAT_TENSORS)
    await collect(send_request(model, COUNT=np.array([4], np.int32)))
    stats = model.statistics.snapshot()
    assert (stats["inference_count"], stats["execution_count"]) == (1, 1)
    assert stats["inference_stats"]["success"]["count"] == 1


async def test_many_concurrent_requests(serve):
    model = await serve(IDENTITY)
    streams = [send_request(model, IN=np.full(2, i, np.float32)) for i in range(300)]
    for i, stream in enumerate(streams):
        (response,) = await collect(stream)
        assert response.output("OUT").array[0] == i
    assert model.statistics.success.count == 300 and model.in_flight_count == 0


BATCHED = (
    HEAD
    + """
    def execute(self, requests):
        time.sleep(0.05)
        values = [request.inputs()[0].as_numpy().sum() for request in requests]
        if sum(values) > 1000:
            raise pb_utils.TritonModelException("too much")
        return [
            pb_utils.InferenceResponse(error=pb_utils.TritonError("negative"))
            if value < 0
            else pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.full((len(request.inputs()[0].as_numpy()), 1), len(requests), np.float32))]
            )
            for value, request in zip(values, requests)
        ]
"""
)
BATCHING = IDENTITY_TENSORS + "max_batch_size: 4 dynamic_batching { }"


def rows(*values: float) -> np.ndarray:
    return np.array([[value] for value in values], np.float32)


async def test_dynamic_batching_executes_requests_together(serve):
    model = await serve(BATCHED, BATCHING)
    streams = [send_request(model, IN=rows(1)) for _ in range(3)] + [send_request(model, IN=rows(1, 2))]
    responses = [(await collect(stream))[0] for stream in streams]
    assert [response.output("OUT").array[0, 0] for response in responses] == [3, 3, 3, 1]
    statistics = model.statistics.snapshot()
    assert (statistics["inference_count"], statistics["execution_count"]) == (5, 2)
    assert [batch["batch_size"] for batch in statistics["batch_stats"]] == [2, 3]


async def test_error_response_in_a_batch_fails_only_its_request(serve):
    model = await serve(BATCHED, BATCHING)
    good, bad = send_request(model, IN=rows(1)), send_request(model, IN=rows(-1))
    assert (await collect(good))[0].error is None
    error = (await collect(bad))[0].error
    assert error is not None and error.message == "negative"


async def test_exception_fails_only_its_batch(serve):
    model = await serve(BATCHED, BATCHING)
    batch = [send_request(model, IN=rows(1)), send_request(model, IN=rows(2000))]
    for stream in batch:
        (response,) = await collect(stream)
        assert response.error is not None and "too much" in response.error.message
    (response,) = await collect(send_request(model, IN=rows(1)))
    assert response.error is None


async def test_batches_are_distributed_to_all_instances(serve):
    code = BATCHED.replace("time.sleep(0.05)", "self.meet()") + MEETING
    model = await serve(code, BATCHING + " instance_group { count: 2 }")
    streams = [send_request(model, IN=rows(1, 2, 3, 4)) for _ in range(4)]
    for stream in streams:
        assert (await collect(stream))[0].error is None


async def test_logger_follows_the_log_settings(serve, caplog):
    code = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                pb_utils.Logger.log_verbose("quietly")
                pb_utils.Logger.log_info("aloud")
                (request,) = requests
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])]
    """
    settings = log_settings()
    model = await serve(code)
    for level in (0, 1):
        settings.update({"log_verbose_level": level})
        await collect(send_request(model, IN=np.ones(1, np.float32)))
    records = [record for record in caplog.records if record.name == "neso.model"]
    assert [record.message for record in records] == ["aloud", "quietly", "aloud"]
    assert {(record.model, record.model_version, record.filename) for record in records} == {
        ("model", "1", "model.py")
    }


async def test_untraced_request_has_a_trace_without_context(serve):
    code = """
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                for request in requests:
                    trace = request.trace()
                    assert isinstance(trace, pb_utils.InferenceTrace) and trace.get_context() is None
                    pb_utils.InferenceRequest(
                        model_name="any", inputs=[], requested_output_names=[], trace=trace)
                (request,) = requests
                return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy())])]
    """
    model = await serve(code)
    (response,) = await collect(send_request(model, IN=np.ones(1, np.float32)))
    assert response.error is None, response.error
