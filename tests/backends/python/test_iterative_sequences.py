"""Iterative sequences: rescheduled requests of Python models."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from neso.server.errors import Cancelled
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.model import Model
from neso.server.tensor import Tensor

CONFIG = """
max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
sequence_batching { iterative_sequence: true %s }
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"

COUNTDOWN = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Answers once, after as many executions as the input says: the flags and batch sizes that it saw.'''

    def initialize(self, args):
        self.seen = {}

    def execute(self, requests):
        time.sleep(0.002)
        responses = []
        for request in requests:
            key = request.correlation_id()
            count = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().item()
            seen = self.seen.setdefault(key, [])
            seen.append(10 * request.flags() + len(requests))
            if len(seen) < count:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                responses.append(None)
            else:
                out = pb_utils.Tensor("OUT", np.array([self.seen.pop(key)], np.int32))
                responses.append(pb_utils.InferenceResponse([out]))
        return responses
"""

GENERATOR = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Sends what remains after each execution. The server keeps it: each response has the next state.'''

    def execute(self, requests):
        time.sleep(0.002)
        for request in requests:
            value = lambda name: pb_utils.get_input_tensor_by_name(request, name).as_numpy()
            remaining = (value("IN") if value("START").item() else value("REMAINING")) - 1
            tensors = [pb_utils.Tensor("OUT", remaining), pb_utils.Tensor("NEXT", remaining)]
            sender = request.get_response_sender()
            if remaining.item() > 0:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
                sender.send(pb_utils.InferenceResponse(tensors))
            else:
                sender.send(pb_utils.InferenceResponse(tensors), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
STATE = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START bool_false_true: [ false, true ] } }
state { input_name: "REMAINING" output_name: "NEXT" data_type: TYPE_INT32 dims: [ 1 ] }
"""


def submit(model: Model, value: int, **options: Any) -> ResponseStream:
    tensor = Tensor.from_numpy("IN", np.array([[value]], np.int32))
    return model.submit(InferenceRequest(model.name, {"IN": tensor}, **options))


async def numbers(stream: ResponseStream) -> list[int]:
    """Return the numbers of all responses in order."""
    result: list[int] = []
    async for response in stream:
        if response.error is not None:
            raise response.error
        for tensor in response.outputs:
            result += tensor.array.ravel().tolist()
    return result


async def test_request_is_executed_until_its_final_response(serve) -> None:
    model = await serve(COUNTDOWN, CONFIG % "")
    started = time.monotonic_ns()
    seen = await numbers(submit(model, 4))
    took = time.monotonic_ns() - started
    assert seen == [11, 1, 1, 1]  # START the first time, no flags after it
    stats = model.statistics.snapshot()
    assert (stats["inference_count"], stats["execution_count"]) == (1, 4)
    # Waiting between executions (of 2 ms each) does not count as queue time.
    assert stats["inference_stats"]["queue"]["ns"] <= took - 4 * 2_000_000
    assert model.in_flight_count == 0


async def test_requests_join_and_leave_the_running_batch(serve) -> None:
    model = await serve(COUNTDOWN, CONFIG % "")
    seen = await asyncio.gather(*(numbers(submit(model, count)) for count in (2, 30, 5)))
    assert [len(executions) for executions in seen] == [2, 30, 5]
    long = [number % 10 for number in seen[1]]
    assert long[0] == long[1] == 3 and long[2:5] == [2, 2, 2] and set(long[5:]) == {1}


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
async def test_more_requests_than_slots(serve, strategy: str) -> None:
    model = await serve(COUNTDOWN, CONFIG % strategy)
    counts = [3, 1, 7, 2, 5, 4, 6, 2, 1, 8]
    seen = await asyncio.wait_for(asyncio.gather(*(numbers(submit(model, count)) for count in counts)), 60)
    assert [len(executions) for executions in seen] == counts


async def test_states_carry_over_between_iterations_of_a_decoupled_model(serve) -> None:
    model = await serve(GENERATOR, DECOUPLED % STATE)
    results = await asyncio.gather(*(numbers(submit(model, count)) for count in (3, 6, 1)))
    assert results == [[2, 1, 0], [5, 4, 3, 2, 1, 0], [0]]


async def test_cancelled_request_frees_its_slot(serve) -> None:
    model = await serve(COUNTDOWN, (CONFIG % "").replace("max_batch_size: 4", "max_batch_size: 1"))
    endless = submit(model, 10**9)
    waiting = submit(model, 1)
    await asyncio.sleep(0.05)
    assert not waiting.closed
    endless.cancel()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(numbers(endless), 60)
    assert await asyncio.wait_for(numbers(waiting), 60) == [11]


async def test_warmup_is_executed_once(serve) -> None:
    zeros = "data_type: TYPE_INT32 dims: [ 1 ] zero_data: true"
    warmup = f'model_warmup {{ name: "w" inputs {{ key: "IN" value {{ {zeros} }} }} }}'
    code = COUNTDOWN.replace("if len(seen) < count", "if count == 0 or len(seen) < count")
    model = await asyncio.wait_for(serve(code, CONFIG % "" + warmup), 60)
    assert await numbers(submit(model, 2)) == [11, 1]


async def test_client_may_choose_the_sequence_id(serve) -> None:
    model = await serve(COUNTDOWN, CONFIG % "")
    for _ in range(2):  # the sequence ends with its request, without END
        assert await numbers(submit(model, 2, sequence_id="mine", sequence_start=True)) == [11, 1]
    (response,) = [r async for r in submit(model, 1, sequence_id="mine")]
    assert "must specify the START flag" in response.error.message


async def test_coroutine_may_reschedule(serve) -> None:
    code = GENERATOR.replace("    def execute", "    async def execute").replace(
        "time.sleep", "await asyncio.sleep"
    )
    model = await serve("import asyncio\n" + code, DECOUPLED % STATE)
    assert await asyncio.wait_for(numbers(submit(model, 5)), 60) == [4, 3, 2, 1, 0]


async def test_models_without_iterative_sequences_cannot_reschedule(serve) -> None:
    model = await serve(COUNTDOWN, (CONFIG % "").replace("iterative_sequence: true", ""))
    (response,) = [r async for r in submit(model, 2, sequence_id=1, sequence_start=True)]
    assert "sequence_batching { iterative_sequence: true }" in response.error.message


async def test_rescheduled_request_must_not_have_a_response(serve) -> None:
    code = COUNTDOWN.replace("responses.append(None)", "responses.append(pb_utils.InferenceResponse([]))")
    model = await serve(code, CONFIG % "")
    (response,) = [r async for r in submit(model, 2)]
    assert "Expected a None object" in response.error.message
    assert await numbers(submit(model, 1)) == [11]
