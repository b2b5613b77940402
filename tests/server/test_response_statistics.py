"""`response_stats`: statistics of the responses of decoupled models."""

from __future__ import annotations

import time

import numpy as np
import pytest
from core_requests import collect, send_request

from neso.server.statistics import MAX_RESPONSES, ResponseOutcome, ResponseStatistics, Timeline

MS = 1_000_000
NAMES = ["compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"]

PACED = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Each of COUNT's numbers is a response: it sleeps as many ms. -1: an error. -2: waits for the cancel.'''

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            numbers = pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()
            for number in numbers:
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))])
                if number >= 0:
                    time.sleep(number / 1000)
                elif number == -1:
                    response = pb_utils.InferenceResponse(error=pb_utils.TritonError("no"))
                else:
                    while not request.is_cancelled():
                        time.sleep(0.005)
                    error = pb_utils.TritonError("seen", pb_utils.TritonError.CANCELLED)
                    response = pb_utils.InferenceResponse(error=error)
                sender.send(response)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
PACED_TENSORS = """
input { name: "COUNT" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
model_transaction_policy { decoupled: true }
"""


@pytest.fixture
async def core(repository, start_core):
    repository.add("paced", PACED, PACED_TENSORS)
    return await start_core()


def counts(stats, index: int) -> dict[str, int]:
    """Return the nonzero counts at an index."""
    return {name: each["count"] for name, each in stats[str(index)].items() if each["count"]}


def response_stats(core, name: str = "paced"):
    return core.model(name).statistics.snapshot()["response_stats"]


async def test_statistics_by_response_index(core):
    took = []
    for numbers in ([30, 1], [30]):
        started = time.monotonic_ns()
        await collect(send_request(core.model("paced"), COUNT=np.array(numbers, np.int32)))
        took.append(time.monotonic_ns() - started)
    stats = response_stats(core)
    assert list(stats) == ["0", "1", "2"] and list(stats["0"]) == NAMES
    computed = {"compute_infer": 1, "compute_output": 1, "success": 1}
    assert counts(stats, 0) == dict.fromkeys(computed, 2)
    assert counts(stats, 1) == {**computed, "empty_response": 1}
    assert counts(stats, 2) == {"empty_response": 1}
    first = {name: each["ns"] for name, each in stats["0"].items()}
    assert 60 * MS <= first["compute_infer"] <= sum(took)
    assert first["success"] == first["compute_infer"] + first["compute_output"]
    # Measured from the first response, not from the request.
    assert stats["1"]["compute_infer"]["ns"] <= took[0] - 30 * MS


async def test_failed_and_cancelled_responses(core):
    await collect(send_request(core.model("paced"), COUNT=np.array([0, -1], np.int32)))
    stream = send_request(core.model("paced"), COUNT=np.array([0, 0, -2], np.int32))
    for _ in range(2):
        await anext(stream)
    stream.cancel()
    await collect(stream)
    stats = response_stats(core)
    assert counts(stats, 1)["fail"] == 1 and counts(stats, 1)["compute_infer"] == 2
    assert counts(stats, 2)["cancel"] == 1 and "compute_infer" not in counts(stats, 2)


async def test_non_decoupled_models_have_no_response_statistics(repository, start_core):
    repository.add_standard()
    core = await start_core()
    await collect(send_request(core.model("identity"), IN=np.ones(1, np.float32)))
    assert response_stats(core, "identity") == {}


def test_responses_are_counted_up_to_the_maximum_index():
    statistics, timeline = ResponseStatistics(), Timeline()
    for _ in range(MAX_RESPONSES + 5):
        statistics.record(timeline, time.monotonic_ns(), ResponseOutcome.SUCCESS)
    assert len(statistics.as_dict()) == MAX_RESPONSES and timeline.responses == MAX_RESPONSES + 5


def test_durations_are_not_negative():
    statistics, timeline = ResponseStatistics(), Timeline()
    for made in (1, time.monotonic_ns() + 10**12):  # kept from an earlier request; from a different clock
        statistics.record(timeline, made, ResponseOutcome.SUCCESS)
    assert all(each["ns"] >= 0 for place in statistics.as_dict().values() for each in place.values())
