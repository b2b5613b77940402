"""Decoupled models whose clients do not read the responses."""

from __future__ import annotations

import numpy as np
import pytest
from core_requests import send_request
from eventually import standstill, until

from neso.server.errors import Unavailable

CONFIG = """
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }
model_transaction_policy { decoupled: true }
"""
# Sends 100 responses of 200 KB, and writes the number of sent responses to a file.
MODEL = """
import pathlib
import numpy as np
import triton_python_backend_utils as pb_utils

SENT = pathlib.Path(__file__).with_name("sent")

class TritonPythonModel:
    {kind} execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(100):
                if sender.is_cancelled():
                    break
                out = pb_utils.Tensor("OUT", np.full(50_000, number, np.float32))
                sender.send(pb_utils.InferenceResponse([out]))
                SENT.write_text(str(number + 1))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
"""


def sent(model) -> int:
    file = model.version_directory / "sent"
    return int(file.read_text() or 0) if file.exists() else 0


async def test_model_waits_until_responses_are_read(serve) -> None:
    model = await serve(MODEL.format(kind="def"), CONFIG)
    stream = send_request(model, IN=np.zeros(1, np.float32))
    await until(lambda: sent(model))
    assert await standstill(lambda: sent(model), 100) < 20
    values = [each.outputs[0].array[0] async for each in stream if each.outputs]
    assert values == list(range(100))


async def test_model_continues_when_its_client_is_gone(serve) -> None:
    model = await serve(MODEL.format(kind="def"), CONFIG)
    stream = send_request(model, IN=np.zeros(1, np.float32))
    await until(lambda: stream.congested)
    stream.cancel()
    await until(lambda: model.in_flight_count == 0)
    assert len([each async for each in send_request(model, IN=np.zeros(1, np.float32))]) == 101


async def test_request_of_a_coroutine_is_cancelled(serve) -> None:
    # The event loop of the model serves other clients too, so it waits only briefly.
    model = await serve(MODEL.format(kind="async def"), CONFIG)
    stream = send_request(model, IN=np.zeros(1, np.float32))
    await until(lambda: stream.closed)
    responses = [each async for each in stream]
    assert isinstance(responses[-1].error, Unavailable)
    assert len(responses) < 99


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_fast_client_gets_everything(serve, kind) -> None:
    model = await serve(MODEL.format(kind=kind), CONFIG)
    values = [
        each.outputs[0].array[0]
        async for each in send_request(model, IN=np.zeros(1, np.float32))
        if each.outputs and each.error is None
    ]
    assert values == list(range(100))
