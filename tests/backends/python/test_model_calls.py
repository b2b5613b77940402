"""Business logic scripting: Python models that call, load and query other models."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_requests import collect, send_request
from eventually import standstill, until
from repository_builder import IDENTITY_TENSORS, REPEAT, REPEAT_TENSORS, SLOW, RepositoryBuilder

from neso.server.core import Core
from neso.server.errors import ErrorCode, Overloaded
from neso.server.options import ModelControlMode, ServerOptions

HEAD = """
import asyncio, threading, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

def call(model, name="IN", value=(1,), kind=np.float32, **options):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=["OUT"],
        inputs=[pb_utils.Tensor(name, np.array(value, kind))], **options)

def wait_for_go():
    while not (Path(pb_utils.get_model_dir()) / "go").exists():
        time.sleep(0.01)

def answer(*values):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(values, np.float32))])

def values(response):
    if response.has_error():
        raise pb_utils.TritonModelException(f"{response.error().code()}: {response.error().message()}")
    return [float(v) for t in response.output_tensors() for v in t.as_numpy()]

class TritonPythonModel:
"""
DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() * 2)]) for r in requests
        ]
"""

FLOOD = """
import pathlib
import numpy as np
import triton_python_backend_utils as pb_utils

SENT = pathlib.Path(__file__).with_name("sent")

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(request.inputs()[0].as_numpy()[0])):
                if sender.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(50_000, number, np.int32))]))
                SENT.write_text(str(number + 1))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Sends COUNT responses of 200 KB, and writes the number of sent responses to a file."""

FLOOD_TENSORS = REPEAT_TENSORS.replace("dims: [ 1 ] }\nmodel", "dims: [ -1 ] }\nmodel")

PAIRS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.waiting = []

    def execute(self, requests):
        self.waiting += [request.get_response_sender() for request in requests]
        if len(self.waiting) == 2:
            for i, sender in enumerate(self.waiting):
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([i], np.int32))])
                sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""Responds when there are two requests."""


@pytest.fixture
async def serve(tmp_path: Path, python_options):
    """`await serve(code, decoupled=False)` returns the core; `code` is that of the model "caller".

    `flood`: code of a model "flood" with tensors as `FLOOD`, served instead of the other models.
    """
    cores: list[Core] = []

    async def start(code: str, decoupled: bool = False, flood: str = "", **options: Any) -> Core:
        repository = RepositoryBuilder(tmp_path / f"models{len(cores)}")
        if flood:
            repository.add("flood", flood, FLOOD_TENSORS)
        else:
            repository.add("double", DOUBLE)
            repository.add("repeat", REPEAT, REPEAT_TENSORS)
            repository.add("slow", SLOW)
            repository.add("pairs", PAIRS, REPEAT_TENSORS)
        policy = "model_transaction_policy { decoupled: true }" if decoupled else ""
        repository.add("caller", HEAD + code, IDENTITY_TENSORS + policy)
        core = Core(
            ServerOptions((repository.path,), exit_timeout=1, backend_config=python_options, **options)
        )
        cores.append(core)
        await core.start()
        reasons = [entry.reason for entry in core.repository_index() if entry.reason]
        assert not reasons, reasons
        return core

    yield start
    for core in cores:
        await core.stop()


async def outcome(core: Core, *values: float) -> list[float] | str:
    """Return the values of the caller's response, or its error message."""
    stream = send_request(core.model("caller"), IN=np.array(values or (1,), np.float32))
    found: list[float] = []
    for response in await asyncio.wait_for(collect(stream), 60):
        if response.error is not None:
            return response.error.message
        for output in response.outputs:
            found += output.array.tolist()
    return found


async def test_exec_returns_the_response_of_another_model(serve):
    core = await serve("""
    def execute(self, requests):
        return [answer(*values(call("double", value=r.inputs()[0].as_numpy()).exec())) for r in requests]
""")
    assert await outcome(core, 3, 4) == [6, 8]
    assert core.model("double").statistics.inference_count == 1


async def test_async_exec_in_concurrent_coroutines(serve):
    core = await serve("""
    async def execute(self, requests):
        calls = [call("double", value=[i]).async_exec() for i in range(5)]
        responses = await asyncio.gather(*calls)
        return [answer(*(values(r)[0] for r in responses))]
""")
    assert await outcome(core) == [0, 2, 4, 6, 8]


async def test_unexpected_error_ends_the_call(serve, monkeypatch):
    core = await serve("""
    def execute(self, requests):
        return [answer(*values(call("double").exec())) for _ in requests]
""")

    def fail(*arguments):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(core.model("double"), "submit", fail)
    assert "RuntimeError: out of luck" in await asyncio.wait_for(outcome(core), 60)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            'call("nope")',
            "2: Model nope - Error when running inference: Request for unknown model: 'nope' is not found",
        ),
        ('call("double", model_version=7)', "'double' version 7 is not found"),
        ('call("double", name="WHAT")', "[request id: <id_unknown>] unexpected inference input 'WHAT'"),
        ('call("double", kind=np.int8)', "data-type is 'INT8', but model 'double' expects 'FP32'"),
        ('call("repeat", "COUNT", [3], np.int32)', "Please use 'decoupled=True'"),
        ('call("")', "needs a model_name"),
    ],
)
async def test_errors_are_returned_to_the_caller(serve, wrong, message):
    core = await serve(f"""
    def execute(self, requests):
        return [answer(*values({wrong}.exec()))]
""")
    assert message in await outcome(core)


async def test_decoupled_responses_are_iterated(serve):
    core = await serve(
        """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for response in call("repeat", "COUNT", [4], np.int32).exec(decoupled=True):
                if response.output_tensors():
                    sender.send(answer(*values(response)))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
        decoupled=True,
    )
    assert await outcome(core) == [0, 1, 2, 3]


async def test_decoupled_responses_in_a_coroutine(serve):
    core = await serve("""
    async def execute(self, requests):
        found = []
        async for response in await call("repeat", "COUNT", [3], np.int32).async_exec(decoupled=True):
            found += values(response)
        return [answer(*found)]
""")
    assert await outcome(core) == [0, 1, 2]


async def test_blocking_iteration_of_asynchronous_calls(serve):
    core = await serve("""
    async def execute(self, requests):
        calls = [call("repeat", "COUNT", [n], np.int32).async_exec(decoupled=True) for n in (2, 3)]
        return [answer(*(v for responses in await asyncio.gather(*calls) for r in responses for v in values(r)))]
""")
    assert await outcome(core) == [0, 1, 0, 1, 2]


async def test_loops_over_responses_continue_and_start_again(serve):
    core = await serve("""
    async def execute(self, requests):
        responses = call("repeat", "COUNT", [3], np.int32).exec(decoupled=True)
        found = values(next(responses))
        for response in responses:  # continues
            found += values(response)
            break
        for _ in range(2):  # continues, then starts again
            found += [value for response in responses for value in values(response)] + [-1]
        assert next(responses, None) is None
        responses = await call("repeat", "COUNT", [2], np.int32).async_exec(decoupled=True)
        for _ in range(2):
            found += [value async for response in responses for value in values(response)]
        return [answer(*found)]
""")
    assert await outcome(core) == [0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 0, 1]


async def test_asynchronous_calls_wait_for_the_first_response(serve):
    core = await serve("""
    async def execute(self, requests):
        async def one():  # the loop would block the other coroutine's call
            responses = await call("pairs", "COUNT", [1], np.int32).async_exec(decoupled=True)
            return [value for response in responses for value in values(response)]
        return [answer(*sum(await asyncio.gather(one(), one()), []))]
""")
    assert sorted(await outcome(core)) == [0, 1]


async def test_cancelling_a_coroutine_cancels_its_call(serve):
    core = await serve("""
    async def execute(self, requests):
        first = asyncio.create_task(call("pairs", "COUNT", [1], np.int32).async_exec(decoupled=True))
        await asyncio.sleep(0)  # the call is submitted
        first.cancel()
        await asyncio.wait([first])
        return [answer(first.cancelled())]
""")
    assert await outcome(core) == [1]
    await until(lambda: not core.model("pairs").pending_count)


async def test_asynchronous_iteration_of_a_blocking_call_is_an_error(serve):
    core = await serve("""
    async def execute(self, requests):
        async for response in call("repeat", "COUNT", [3], np.int32).exec(decoupled=True):
            pass
""")
    assert "use async_exec()" in str(await outcome(core))


FORKING = """
    def execute(self, requests):
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return [answer(*pool.map({function}, range(4)))]

def double(number):
    (value,) = values(call("double", value=[number]).exec())
    return value

def count(number):
    return sum(v for r in call("repeat", "COUNT", [number], np.int32).exec(decoupled=True) for v in values(r))

def fail(number):
    return call("nope").exec().error().code() + pb_utils.is_model_ready("double") * 10

def metric(number):
    try:
        pb_utils.MetricFamily("m", "d", pb_utils.MetricFamily.COUNTER)
    except pb_utils.TritonModelException as error:
        return "not in forks" in error.message()

async def call_in_coroutine(number):
    responses = await asyncio.gather(*(call("double", value=[number]).async_exec() for _ in range(3)))
    return sum(values(r)[0] for r in responses)

def run_coroutine(number):
    return asyncio.run(call_in_coroutine(number))
"""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("double", [0, 2, 4, 6]),
        ("count", [0, 0, 1, 3]),
        ("fail", [12, 12, 12, 12]),
        ("metric", [1, 1, 1, 1]),
        ("run_coroutine", [0, 6, 12, 18]),
    ],
)
async def test_calls_from_forked_processes(serve, function, expected):
    core = await serve(FORKING.replace("{function}", function))
    for _ in range(2):
        assert await outcome(core) == expected


async def test_fork_in_another_thread_cannot_call(serve):
    core = await serve("""
    def execute(self, requests):
        found = []
        thread = threading.Thread(target=lambda: found.extend(pool_of_one()))
        thread.start()
        thread.join()
        return [answer(*found)]

def pool_of_one():
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(try_to_call, [1])

def try_to_call(number):
    try:
        call("double").exec()
    except pb_utils.TritonModelException as error:
        return "can only be called in the threads that run the model" in error.message()
""")
    assert await outcome(core) == [1]


def flooded(core: Core) -> int:
    """Return the number of responses that the model "flood" has sent."""
    file = core.model("flood").version_directory / "sent"
    return int(file.read_text() or 0) if file.exists() else 0


async def test_called_model_waits_for_the_calling_model(serve):
    core = await serve(
        """
    def execute(self, requests):
        responses = call("flood", "COUNT", [100], np.int32).exec(decoupled=True)
        wait_for_go()
        return [answer(*(v for r in responses for t in r.output_tensors() for v in t.as_numpy()[:1]))]
""",
        flood=FLOOD,
        max_call_backlog=1 << 20,
    )
    result = asyncio.ensure_future(outcome(core))
    await until(lambda: flooded(core))
    assert await standstill(lambda: flooded(core), 100) < 20
    (core.model("caller").version_directory / "go").touch()
    assert await result == list(range(100))


async def test_models_that_wait_for_each_other_continue(serve):
    """The only instance of "flood" waits for the caller, which waits for its own second call of "flood"."""
    core = await serve(
        """
    def execute(self, requests):
        first = call("flood", "COUNT", [100], np.int32).exec(decoupled=True)
        next(first)
        second = list(call("flood", "COUNT", [3], np.int32).exec(decoupled=True))
        first = list(first)
        assert "are not read" in first[-1].error().message(), first[-1].error()
        return [answer(first[-1].error().code(), len(first) < 20, *(len(r.output_tensors()) for r in second))]
""",
        flood=FLOOD,
        max_call_backlog=1 << 20,
        call_backlog_timeout=0.5,
    )
    assert await outcome(core) == [4, 1, 1, 1, 1, 0]
    await until(lambda: not core.model("flood").in_flight_count)


async def test_coroutines_of_a_called_model_cannot_wait(serve):
    """Their call is cancelled when much more than the limit waits."""
    core = await serve(
        """
    def execute(self, requests):
        responses = call("flood", "COUNT", [300], np.int32).exec(decoupled=True)
        wait_for_go()
        received = list(responses)
        return [answer(received[-1].error().code(), len(received) < 200)]
""",
        flood=FLOOD.replace("def execute", "async def execute"),
        max_call_backlog=1 << 20,
    )
    result = asyncio.ensure_future(outcome(core))
    called = core.model("flood")
    await until(lambda: called.in_flight_count)
    await until(lambda: not called.in_flight_count)
    (core.model("caller").version_directory / "go").touch()
    assert await result == [4, 1]


async def test_second_loop_over_large_responses_is_an_error(serve):
    core = await serve(
        """
    def execute(self, requests):
        responses = call("flood", "COUNT", [100], np.int32).exec(decoupled=True)
        count = sum(len(response.output_tensors()) for response in responses)
        try:
            list(responses)
        except pb_utils.TritonModelException as error:
            assert "can only be iterated once" in error.message()
            return [answer(count)]
""",
        flood=FLOOD,
    )
    assert await outcome(core) == [100]


async def test_errors_keep_their_class_and_retry_after(serve, monkeypatch):
    core = await serve("""
    def execute(self, requests):
        error = call("double").exec().error()
        return [pb_utils.InferenceResponse(error=error)]
""")

    def submit(request):
        error = Overloaded("busy")
        error.retry_after = 7
        raise error

    monkeypatch.setattr(core.model("double"), "submit", submit)
    (response,) = await collect(send_request(core.model("caller"), IN=np.ones(1, np.float32)))
    assert isinstance(response.error, Overloaded)
    assert response.error.retry_after == 7 and "busy" in response.error.message


async def test_cancelling_a_call(serve):
    core = await serve("""
    def execute(self, requests):
        responses = call("slow").exec(decoupled=True)
        threading.Timer(0.05, responses.cancel).start()
        response, = responses
        return [answer(response.error().code())]
""")
    assert await outcome(core) == [7]


SENDS_TRACEBACKS = """
    def execute(self, requests):
        import traceback
        try:
            response = call("double", name="WRONG").exec()
            if response.has_error():
                raise {error}
        except Exception:
            error = pb_utils.TritonError(traceback.format_exc())
        return [pb_utils.InferenceResponse(error=error)]
"""


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (
            "pb_utils.TritonModelException(response.error().message())",
            "unexpected inference input 'WRONG'",
            ErrorCode.INVALID_ARG,
        ),
        ("KeyError('a')", "KeyError: 'a'", ErrorCode.INTERNAL),
    ],
    ids=["error of the called model", "error of the caller"],
)
async def test_traceback_is_not_sent_to_the_client(serve, error, message, code):
    """The client gets the message of the exception, with the code of the called model's error, and no paths."""
    core = await serve(SENDS_TRACEBACKS.format(error=error))
    (response,) = await collect(send_request(core.model("caller"), IN=np.array([1], np.float32)))
    assert response.error is not None
    assert message in response.error.message
    assert "model.py" not in response.error.message
    assert response.error.code is code


async def test_bls_call_from_a_thread_of_the_model(serve):
    core = await serve("""
    def execute(self, requests):
        found = []
        thread = threading.Thread(target=lambda: found.append(call("double").exec()))
        thread.start()
        thread.join()
        return [answer(*values(found[0]))]
""")
    assert await outcome(core) == [2]


async def test_ids_and_parameters_are_passed_on(serve):
    core = await serve("""
    def execute(self, requests):
        request = requests[0]
        if request.parameters() != "{}":
            import json
            told = json.loads(request.parameters())
            return [answer(told["x"], request.correlation_id(), request.flags(), len(request.request_id()))]
        other = call("caller2", parameters={"x": 5}, correlation_id=7, flags=3, request_id="abc")
        return [answer(*values(other.exec()))]
""")
    source = core.options.model_repository[0] / "caller"
    RepositoryBuilder(core.options.model_repository[0]).add(
        "caller2", (source / "1" / "model.py").read_text()
    )
    await core.stop()
    again = Core(ServerOptions(core.options.model_repository, exit_timeout=1))
    await again.start()
    assert await outcome(again) == [5, 7, 3, 3]
    await again.stop()


async def test_model_loads_and_unloads_another(serve):
    code = """
    def execute(self, requests):
        states = [pb_utils.is_model_ready("double"), pb_utils.is_model_ready("double", "1")]
        pb_utils.load_model("double")
        states += [pb_utils.is_model_ready("double"), pb_utils.is_model_ready("double", "2")]
        value = values(call("double").exec())
        pb_utils.unload_model("double")
        return [answer(*states, *value, pb_utils.is_model_ready("double"))]
"""
    options = {"model_control_mode": ModelControlMode.EXPLICIT, "startup_models": ("caller",)}
    assert await outcome(await serve(code, **options)) == [0, 0, 1, 0, 2, 0]
    assert "explicit model load / unload is not allowed" in await outcome(await serve(code))
