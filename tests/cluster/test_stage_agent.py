"""A worker of a stage, without a server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from eventually import until

import neso.cluster.stages.worker as worker_module
import neso.server.processes.messages as wire
from neso.cluster.messages import Welcome
from neso.cluster.stages.messages import StageReport, Task, Work
from neso.cluster.stages.worker import StageAgent, StageWorkerOptions
from neso.server.inference_request import InferenceRequest
from neso.server.tensor import Tensor

IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", r.inputs()[0].as_numpy())]) for r in requests]
"""
CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }
"""


async def test_request_whose_response_cannot_be_encoded_ends_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "same" / "1").mkdir(parents=True)
    (tmp_path / "same" / "1" / "model.py").write_text(IDENTITY)
    (tmp_path / "same" / "config.pbtxt").write_text(CONFIG)
    options = StageWorkerOptions(
        model="same", repositories=[str(tmp_path)], address=f"ipc://{tmp_path}/socket", name="same-1"
    )
    agent = StageAgent(options)
    sent: list[msgspec.Struct] = []
    monkeypatch.setattr(agent._socket, "send", sent.append)
    pack = worker_module.pack_response

    def pack_unless_large(task, response, *rest):
        if any(tensor.array.max() > 100 for tensor in response.outputs):
            raise RuntimeError("there is no form for it")
        return pack(task, response, *rest)

    monkeypatch.setattr(worker_module, "pack_response", pack_unless_large)
    await agent._load()
    try:
        agent._obey(Welcome(0.0))
        agent._obey(Work([task(1, 1000.0), task(2, 7.0)]))
        await until(lambda: len(outcomes(sent)) == 2)
    finally:
        await agent._core.stop(0)
        agent._socket.close()
    results = {one.number: wire.decoder.decode(one.response) for one in outcomes(sent)}
    assert results[1].final and "there is no form for it" in results[1].error[0]
    assert results[2].error is None
    assert not agent._running and agent._idle.is_set()


def task(number: int, value: float) -> Task:
    request = InferenceRequest("same", {"X": Tensor.from_numpy("X", np.float32([value]))}, client="")
    return Task(number, 1, msgspec.Raw(wire.pack_request(number, request, "1", "")))


def outcomes(sent: list[msgspec.Struct]) -> list:
    return [outcome for report in sent if isinstance(report, StageReport) for outcome in report.outcomes]
