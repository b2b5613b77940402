"""Ragged batches of Python models."""

from __future__ import annotations

import numpy as np
import pytest
from eventually import until

from neso.server.inference_request import InferenceRequest
from neso.server.tensor import Tensor

MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Answers the size of the batch, and the sum of the request's own input.'''

    def execute(self, requests):
        time.sleep(0.02)
        return [
            pb_utils.InferenceResponse([
                pb_utils.Tensor("OUT", np.array([[len(requests), r.inputs()[0].as_numpy().sum()]], np.float32))
            ])
            for r in requests
        ]
"""
CONFIG = """
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: %s }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "COUNT" data_type: TYPE_INT32 source_input: "IN" }
dynamic_batching { }
"""


@pytest.mark.parametrize(("ragged", "sizes"), [("true", [1, 3, 3, 3]), ("false", [1, 1, 1, 1])])
async def test_ragged_requests_keep_their_shapes(serve, ragged: str, sizes: list[int]) -> None:
    model = await serve(MODEL, CONFIG % ragged)
    streams = []
    for width in (4, 1, 2, 3):
        tensor = Tensor.from_numpy("IN", np.ones((1, width), np.float32))
        streams.append(model.submit(InferenceRequest(model.name, {"IN": tensor})))
        if width == 4:
            await until(lambda: streams[0].timeline.compute_start)  # the others wait together
    answers = [(await anext(stream)).output("OUT").array.ravel().tolist() for stream in streams]
    assert answers == [[size, width] for size, width in zip(sizes, (4, 1, 2, 3), strict=True)]
