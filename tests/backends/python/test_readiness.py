"""`is_ready` functions of Python models."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from core_requests import collect, send_request, send_slow_request
from repository_builder import IDENTITY_TENSORS

from neso.backends.python import backend as backend_module

HEAD = """
import asyncio, time
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = Path(pb_utils.get_model_dir())
        self.calls = 0
    def execute(self, requests):
        time.sleep(float(requests[0].inputs()[0].as_numpy()[0]))
        out = np.array([self.calls], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for _ in requests]
"""


@pytest.fixture(autouse=True)
def long_ready_timeout(monkeypatch):
    monkeypatch.setattr(backend_module, "READY_TIMEOUT", 60.0)


async def check(model) -> bool:
    return await model._backend.context.core.check_model_ready("model")


async def test_models_without_is_ready_are_ready(serve):
    assert await check(await serve(HEAD))


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_is_ready_runs_during_execute(serve, kind):
    model = await serve(
        HEAD
        + f"""
    {kind} is_ready(self):
        return (Path(pb_utils.get_model_dir()) / "yes").exists()
"""
    )
    stream = send_request(model, IN=np.array([0.5], np.float32))
    await asyncio.sleep(0.1)
    assert not await check(model)
    (model._backend.context.version_directory / "yes").touch()
    assert await check(model)
    assert model.ready(), "the server's own readiness does not ask the model"
    assert (await collect(stream))[0].error is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1", "is_ready must return a bool, found type 'int'"),
        ("return None", "found type 'NoneType'"),
        ("raise KeyError('k')", "KeyError"),
    ],
)
async def test_invalid_results_and_errors_mean_not_ready(serve, caplog, body, message):
    model = await serve(HEAD + f"    def is_ready(self):\n        {body}\n")
    assert not await check(model)
    assert message in caplog.text
    assert (await collect(send_request(model, IN=np.zeros(1, np.float32))))[0].error is None


async def test_slow_is_ready_times_out_and_is_not_called_again_meanwhile(serve, monkeypatch):
    monkeypatch.setattr(backend_module, "READY_TIMEOUT", 0.1)
    model = await serve(
        HEAD
        + """
    def is_ready(self):
        self.calls += 1
        while not (self.folder / "go").exists():
            time.sleep(0.005)
        return True
"""
    )
    assert await asyncio.gather(*(check(model) for _ in range(5))) == [False] * 5
    (response,) = await collect(send_request(model, IN=np.zeros(1, np.float32)))
    assert response.output("OUT").array[0] == 1
    (model._backend.context.version_directory / "go").touch()
    monkeypatch.setattr(backend_module, "READY_TIMEOUT", 60.0)
    assert await check(model)


async def test_all_instances_must_be_ready(serve):
    model = await serve(
        HEAD.replace("self.calls = 0", "self.name = args['model_instance_name']; self.calls = 0")
        + """
    def is_ready(self):
        return not (self.folder / f"no_{self.name}").exists()
""",
        IDENTITY_TENSORS + "instance_group { count: 2 }",
    )
    assert await check(model)
    (model._backend.context.version_directory / "no_model_0_1").touch()
    assert not await check(model)


async def test_bls_reports_readiness_to_other_models(serve):
    model = await serve(
        HEAD
        + """
    def is_ready(self):
        return self.calls == 1
    def execute(self, requests):
        answers = []
        for _ in range(2):
            answers.append(pb_utils.is_model_ready("model"))
            self.calls += 1
        out = np.array(answers, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)])]
"""
    )
    (response,) = await asyncio.wait_for(collect(send_slow_request(model)), 60)
    assert response.output("OUT").array.tolist() == [0, 1]
