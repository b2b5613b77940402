"""The in-process server: life cycle and requests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from eventually import until, wait_until
from repository_builder import IDENTITY

import neso
from neso.server.errors import InvalidArgument, NotFound, ServerError, Unavailable
from neso.server.metadata import ModelState
from neso.server.tensor import DataType


def test_start_and_infer(models):
    server = neso.Server(model_repository=str(models.path)).start(wait_until_ready=True)
    assert server.live() and server.ready()
    parts = []
    for response in server.model("text").infer(inputs={"text_input": ["so it goes"], "stream": [True]}):
        parts += response.outputs["text_output"].to_string_array().tolist()
    assert parts == ["so", "it", "goes"]
    server.stop()
    server.stop()
    assert not server.live() and not server.ready()


def test_responses_are_buffered(server):
    responses = server.model("repeat").infer(inputs={"COUNT": [3]}, request_id="r")
    wait_until(lambda: server.model("repeat").statistics()["inference_stats"]["success"]["count"])
    got = list(responses)
    assert [int(response.outputs["OUT"].numpy()[0]) for response in got] == [0, 1, 2]
    assert {response.request_id for response in got} == {"r"}
    assert list(responses) == []


def test_outputs(server):
    (response,) = server.model("identity").infer(inputs={"IN": np.arange(3, dtype=np.float32)})
    tensor = response.outputs["OUT"]
    assert np.asarray(tensor).tolist() == np.from_dlpack(tensor).tolist() == [0, 1, 2]
    assert np.asarray(tensor, np.int8).dtype == np.int8
    assert (tensor.name, tensor.datatype, tensor.shape) == ("OUT", DataType.FP32, (3,))
    with pytest.raises(InvalidArgument, match="is FP32, not BYTES"):
        tensor.to_string_array()
    (response,) = server.model("text").infer(inputs={"text_input": ["ü b"], "stream": [False]})
    assert response.outputs["text_output"].to_bytes_array().tolist() == ["ü b".encode()]
    (again,) = server.model("identity").infer(inputs={"IN": tensor}, outputs=["OUT"])
    assert again.outputs["OUT"].numpy().tolist() == [0, 1, 2]


async def test_async_infer_in_the_callers_loop(server):
    model = server.model("repeat")

    async def run(count):
        return [int(r.outputs["OUT"].numpy()[0]) async for r in model.async_infer(inputs={"COUNT": [count]})]

    assert await asyncio.gather(*(run(n) for n in range(5))) == [list(range(n)) for n in range(5)]
    with pytest.raises(InvalidArgument, match="unexpected shape"):
        await run_all(model.async_infer(inputs={"COUNT": [1, 2]}))


async def run_all(responses):
    return [response async for response in responses]


async def test_async_cancel(server, models):
    responses = server.model("slow").async_infer(inputs={"IN": [1.0]})
    await until((models.path / "slow" / "1" / "begun").exists)
    responses.cancel()
    with pytest.raises(ServerError, match="seen"):
        await asyncio.wait_for(run_all(responses), 60)


def test_cancel(server):
    responses = server.model("slow").infer(inputs={"IN": [1.0]}, raise_on_error=False)
    responses.cancel()
    (response,) = responses
    assert response.error is not None and response.final


def test_errors_are_raised_by_the_iterator(server):
    with pytest.raises(NotFound):
        server.model("nope")
    with pytest.raises(NotFound):
        server.model("identity", 3)
    with pytest.raises(InvalidArgument, match="unexpected inference input 'X'"):
        server.model("identity").infer(inputs={"X": [1.0]})
    with pytest.raises(TypeError):
        server.model("identity").infer(inputs={}, no_such_option=1)


def test_server_metadata(server):
    assert server.metadata().name == "neso"
    assert sorted(model.name for model in server.models().values()) == ["identity", "repeat", "slow", "text"]
    model = server.model("identity", 1)
    assert model.ready() and model.metadata().inputs[0].shape == (-1,)
    assert model.config()["backend"] == "python"
    assert 'nv_inference_request_success{model="identity",version="1"} 0' in server.metrics()
    assert {entry.state for entry in server.index()} == {ModelState.READY}


def test_load_and_unload(server, models):
    model = server.model("identity")
    server.unload("identity")
    assert not model.ready()
    with pytest.raises(Unavailable):
        model.infer(inputs={"IN": [1.0]})
    assert server.load("identity").ready() and model.ready()


def test_calls_after_stop_fail_and_do_not_hang(models):
    server = neso.Server(model_repository=models.path, exit_timeout=0.05).start(wait_until_ready=True)
    model = server.model("slow")
    waiting = model.infer(inputs={"IN": [1.0]})
    server.stop()
    with pytest.raises(ServerError):
        list(waiting)
    waiting.cancel()
    for send_request in (
        lambda: server.model("slow"),
        server.models,
        server.metrics,
        server.metadata,
        lambda: model.infer(inputs={"IN": [1.0]}),
        lambda: server.load("slow"),
        server.start,
    ):
        with pytest.raises(Unavailable):
            send_request()
    assert not model.ready()


def test_stop_before_and_while_starting(models):
    neso.Server(model_repository=models.path).stop()
    models.add("late", "import time\ntime.sleep(0.2)\n" + IDENTITY)
    server = neso.Server(model_repository=models.path).start()
    assert not server.ready()
    server.stop()


def test_missing_repository(tmp_path):
    with pytest.raises(NotFound):
        neso.Server(model_repository=tmp_path / "nope").start(wait_until_ready=True)


def test_stop_while_requests_are_sent(models):
    server = neso.Server(model_repository=models.path).start(wait_until_ready=True)
    ended = []

    def work():
        try:
            while True:
                (_,) = server.model("identity").infer(inputs={"IN": [1.0]})
        except ServerError as error:
            ended.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    server.stop()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 4


def test_reloads_under_load_drop_no_request(server):
    model = server.model("identity")
    done = threading.Event()
    answered: list[int] = []
    failed: list[Exception] = []

    def work():
        while not done.is_set():
            try:
                answered.append(len(list(model.infer(inputs={"IN": [1.0]}))))
            except ServerError as error:
                failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        server.load("identity")
    done.set()
    for thread in threads:
        thread.join(60)
    assert not failed and answered and set(answered) == {1}


def test_importing_neso_is_cheap():
    code = (
        "import sys, neso; assert not {'numpy', 'grpc', 'neso.server'} & set(sys.modules);"
        "neso.Server; assert 'neso.engine' not in sys.modules and 'torch' not in sys.modules;"
        "neso.SamplingParams; assert 'LLM' in dir(neso)\n"
        "try: neso.nope\nexcept AttributeError: pass\nelse: raise SystemExit(1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
