"""Sequences of Python models, with state in the model and with implicit state."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.model import Model
from neso.server.tensor import Tensor

TENSORS = """
input { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] }
"""

ACCUMULATOR = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Adds up the inputs of a sequence; answers the sum, and how many requests were in the batch.'''

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        responses = []
        time.sleep(0.002)
        assert len({r.correlation_id() for r in requests}) == len(requests)
        for request in requests:
            key = request.correlation_id()
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[key] = np.zeros_like(value)
            self.sums[key] = self.sums[key] + value
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", self.sums[key])]))
            if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
                del self.sums[key]
        return responses
"""

CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [ -1, 7 ] } }
control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""

TELL_CONTROLS = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            arrays = {t.name(): t.as_numpy() for t in request.inputs()}
            told = {name: [a.tolist(), str(a.dtype)] for name, a in arrays.items() if name != "IN"}
            text = np.array([json.dumps(told)], np.object_).reshape(arrays["IN"].shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", text)]))
        return responses
"""

STATEFUL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            assert "SUM_OUT" in request.requested_output_names()
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            total = pb_utils.get_input_tensor_by_name(request, "SUM_IN").as_numpy()
            if value.item() < 0:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative")))
                continue
            total = total + value.astype(total.dtype)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", total.astype(value.dtype)), pb_utils.Tensor("SUM_OUT", total)
            ]))
        return responses
"""


def send_request(
    model: Model, sequence: int | str, value: int, flags: str = "", outputs: tuple[str, ...] = ()
) -> ResponseStream:
    """Send a request. `flags`: "s" for START, "e" for END."""
    shape = (1, 1) if model.config.max_batch_size else (1,)
    tensor = Tensor.from_numpy("IN", np.full(shape, value, np.int32))
    return model.submit(
        InferenceRequest(
            "model",
            {"IN": tensor},
            requested_outputs=outputs,
            sequence_id=sequence,
            sequence_start="s" in flags,
            sequence_end="e" in flags,
        )
    )


async def only_response(stream: ResponseStream) -> InferenceResponse:
    (response,) = [response async for response in stream]
    return response


async def sums(streams: list[ResponseStream]) -> list[Any]:
    responses = [await asyncio.wait_for(only_response(stream), 60) for stream in streams]
    for response in responses:
        assert response.error is None, response.error
    return [response.output("OUT").array.item() for response in responses]


@pytest.mark.parametrize(
    "batching",
    [
        "max_batch_size: 4 sequence_batching { }",
        "sequence_batching { direct { } }",
        "max_batch_size: 4 sequence_batching { oldest { max_candidate_sequences: 3 } }",
        "sequence_batching { oldest { max_candidate_sequences: 2 } }",
    ],
)
async def test_sequences_accumulate_on_their_instances(serve, batching) -> None:
    model = await serve(ACCUMULATOR, f"{TENSORS} instance_group {{ count: 2 }} {batching}")
    streams: dict[int | str, list[ResponseStream]] = {key: [] for key in (*range(1, 12), "named", 2**64 - 1)}
    for step in range(5):
        for key, requested in streams.items():
            requested.append(send_request(model, key, step + 1, {0: "s", 4: "e"}.get(step, "")))
    for requested in streams.values():
        assert await sums(requested) == [1, 3, 6, 10, 15]
    assert model.statistics.inference_count == 5 * len(streams)
    if model.config.max_batch_size:
        assert model.statistics.execution_count < model.statistics.inference_count
        assert max(model.statistics.batches) > 1
    await asyncio.wait_for(model.drain(5), 60)


async def test_requests_without_a_sequence_are_rejected(serve) -> None:
    model = await serve(ACCUMULATOR, f"{TENSORS} sequence_batching {{ }}")
    for sequence, words in ((0, "non-zero or non-empty correlation ID"), (5, "must specify the START flag")):
        error = (await only_response(send_request(model, sequence, 1))).error
        assert isinstance(error, InvalidArgument) and words in error.message


async def test_configuration_is_auto_completed(serve) -> None:
    batching = (await serve(ACCUMULATOR, f"{TENSORS} sequence_batching {{ }}")).config.sequence_batching
    assert batching.max_sequence_idle_microseconds == 1_000_000
    assert batching.WhichOneof("strategy_choice") == "direct"


@pytest.mark.parametrize("size", [0, 2])
async def test_control_inputs(serve, size) -> None:
    config = TENSORS.replace('name: "OUT" data_type: TYPE_INT32', 'name: "TOLD" data_type: TYPE_STRING')
    model = await serve(TELL_CONTROLS, f"max_batch_size: {size} {config} sequence_batching {{ {CONTROLS} }}")
    assert set(model.signature.inputs) == {"IN"}
    for flags in ("s", "", "e"):
        response = await only_response(send_request(model, 2**40, 1, flags))
        assert response.error is None, response.error
        reported = json.loads(response.output("TOLD").array.item())

        def shaped(value: Any) -> Any:
            return [[value]] if size else [value]

        assert reported == {
            "START": [shaped(float("s" in flags)), "float32"],
            "END": [shaped("e" in flags), "bool"],
            "READY": [shaped(7), "int32"],
            "CORRID": [shaped(2**40), "uint64"],
        }
    error = (await only_response(send_request(model, "text", 1, "s"))).error
    assert isinstance(error, InvalidArgument) and "does not fit the control input 'CORRID'" in error.message


STATE = 'state { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT64 dims: [ -1 ] %s }'


@pytest.mark.parametrize("size", [0, 4])
@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
async def test_implicit_state_belongs_to_its_sequence(serve, size, strategy) -> None:
    state = STATE % ""
    model = await serve(
        STATEFUL, f"max_batch_size: {size} {TENSORS} sequence_batching {{ {strategy} {state} }}"
    )
    keys = (1, "b", 3)
    streams = {
        key: [
            send_request(model, key, value * index, flags) for value, flags in ((1, "s"), (2, ""), (3, "e"))
        ]
        for index, key in enumerate(keys, 1)
    }
    for index, key in enumerate(keys, 1):
        assert await sums(streams[key]) == [index, 3 * index, 6 * index]
    response = await only_response(send_request(model, 1, 9, "s", outputs=("OUT",)))
    assert [(tensor.name, tensor.array.item()) for tensor in response.outputs] == [("OUT", 9)]
    # An error does not change the state, a second START resets it.
    assert "negative" in (await only_response(send_request(model, 1, -1))).error.message
    assert await sums([send_request(model, 1, 1), send_request(model, 1, 1, "s")]) == [10, 1]


async def test_state_that_is_also_an_output_is_sent_to_the_client(serve) -> None:
    outputs = TENSORS + 'output { name: "SUM_OUT" data_type: TYPE_INT64 dims: [ 1 ] }'
    state = STATE % "initial_state { name: 'five' data_type: TYPE_INT64 dims: [ 1 ] data_file: 'five' }"
    # The fixture writes into the version folder; initial states are next to it.
    five = {"../initial_state/five": (5).to_bytes(8, "little").decode()}
    model = await serve(STATEFUL, f"{outputs} sequence_batching {{ {state} }}", five)
    response = await only_response(send_request(model, 1, 2, "s"))
    assert {tensor.name: tensor.array.item() for tensor in response.outputs} == {"OUT": 7, "SUM_OUT": 7}


async def test_sequence_continues_after_a_model_error(serve) -> None:
    code = ACCUMULATOR.replace(
        "time.sleep(0.002)", "assert all(r.inputs()[0].as_numpy().item() for r in requests)"
    )
    model = await serve(code, f"{TENSORS} sequence_batching {{ }}")
    streams = [
        send_request(model, 1, value, flags) for value, flags in ((1, "s"), (0, ""), (2, "e"), (4, "se"))
    ]
    assert "AssertionError" in (await only_response(streams.pop(1))).error.message
    assert await sums(streams) == [1, 3, 4]
