"""Batches compared with the same requests executed one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from tritonclient.grpc.model_config_pb2 import ModelConfig

from neso.server.errors import InternalError, InvalidArgument
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import ResponseStream
from neso.server.schedulers.batch import Batch
from neso.server.signature import Signature
from neso.server.tensor import Tensor

PLAIN = """
name: "m" max_batch_size: 64
input { name: "IN" data_type: TYPE_FP32 dims: [ 2, -1 ] }
input { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2, -1 ] }
output { name: "TEXT_OUT" data_type: TYPE_STRING dims: [ 1 ] }
"""
KINDS = [
    "ELEMENT_COUNT",
    "ACCUMULATED_ELEMENT_COUNT",
    "ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "MAX_ELEMENT_COUNT_AS_SHAPE",
    "ITEM_SHAPE",
    "ITEM_SHAPE_FLATTEN",
]
RAGGED = """
name: "m" max_batch_size: 64
input { name: "IN" data_type: TYPE_FP32 dims: [ -1, -1 ] allow_ragged_batch: true }
output { name: "OUT" data_type: TYPE_FP32 dims: [ -1, 2 ] }
batch_output { target_name: "OUT" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "IN" }
""" + "".join(
    f'batch_input {{ kind: BATCH_{kind} target_name: "{kind}" data_type: TYPE_INT32 source_input: "IN" }}\n'
    for kind in KINDS
)


def make(text: str, *requests: dict[str, Any]) -> Batch:
    config = text_format.Parse(text, ModelConfig())
    signature = Signature(config)
    streams = []
    for arrays in requests:
        inputs = {name: Tensor.from_numpy(name, array) for name, array in arrays.items()}
        request = InferenceRequest("m", inputs)
        streams.append(ResponseStream(request, batch_size=signature.check(request)))
    return Batch.collect(streams, signature, config)


floats = st.floats(-10, 10, width=32)
shapes_of_rows = st.lists(st.integers(1, 4), min_size=1, max_size=6)


@given(rows=shapes_of_rows, width=st.integers(1, 4), data=st.data())
def test_results_equal_those_of_single_requests(rows: list[int], width: int, data: st.DataObject) -> None:
    requests = [
        {
            "IN": data.draw(np_st.arrays(np.float32, (count, 2, width), elements=floats)),
            "TEXT": np.array([[f"{index}.{row}"] for row in range(count)], np.object_),
        }
        for index, count in enumerate(rows)
    ]

    def model(inputs: dict[str, Any]) -> dict[str, Any]:
        return {"OUT": inputs["IN"] * 2 + 1, "TEXT_OUT": inputs["TEXT"]}

    batch = make(PLAIN, *requests)
    assert batch.size == sum(rows)
    for request, outputs in zip(requests, batch.scatter(model(batch.inputs)), strict=True):
        alone = make(PLAIN, request)
        (expected,) = alone.scatter(model(alone.inputs))
        assert [tensor.name for tensor in outputs] == ["OUT", "TEXT_OUT"]
        for tensor, other in zip(outputs, expected, strict=True):
            assert tensor.datatype is other.datatype
            np.testing.assert_array_equal(tensor.array, other.array)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=6))
def test_ragged_requests_are_concatenated(extents: list[tuple[int, int]]) -> None:
    arrays = [
        np.full((rows, extent, 2), index, np.float32) + np.arange(extent, dtype=np.float32)[:, None]
        for index, (rows, extent) in enumerate(extents)
    ]
    batch = make(RAGGED, *({"IN": array} for array in arrays))
    assert batch.size == sum(rows for rows, _ in extents)
    np.testing.assert_array_equal(batch.inputs["IN"], np.concatenate([array.ravel() for array in arrays]))
    counts = [array.size for array in arrays]
    shapes = [array.shape[1:] for array in arrays for _ in range(array.shape[0])]
    generated = {kind: batch.inputs[kind].tolist() for kind in KINDS}
    assert generated["ELEMENT_COUNT"] == counts
    assert generated["ACCUMULATED_ELEMENT_COUNT"] == np.cumsum(counts).tolist()
    assert generated["ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"] == [0, *np.cumsum(counts).tolist()]
    assert len(generated["MAX_ELEMENT_COUNT_AS_SHAPE"]) == max(counts)
    assert [tuple(shape) for shape in generated["ITEM_SHAPE"]] == shapes
    assert generated["ITEM_SHAPE_FLATTEN"] == [extent for shape in shapes for extent in shape]
    assert all(batch.inputs[kind].dtype == np.int32 for kind in KINDS)
    for array, outputs in zip(arrays, batch.scatter({"OUT": batch.inputs["IN"] * 3}), strict=True):
        np.testing.assert_array_equal(outputs[0].array, array * 3)


def test_item_shapes_of_the_ragged_batching_documentation() -> None:
    batch = make(RAGGED, {"IN": np.zeros((2, 3, 1), np.float32)}, {"IN": np.zeros((1, 2, 2), np.float32)})
    assert batch.inputs["ITEM_SHAPE"].tolist() == [[3, 1], [3, 1], [2, 2]]
    assert batch.inputs["ELEMENT_COUNT"].tolist() == [6, 4]


def test_a_single_request_is_not_copied() -> None:
    array = np.ones((2, 2, 3), np.float32)
    batch = make(PLAIN, {"IN": array, "TEXT": [["a"], ["b"]]})
    assert np.shares_memory(batch.inputs["IN"], array)


def test_tensors_are_unchanged_without_batching() -> None:
    text = PLAIN.replace("max_batch_size: 64", "")
    batch = make(text, {"IN": np.ones((2, 3), np.float32), "TEXT": ["a"]})
    assert batch.size == 1
    ((out,),) = batch.scatter({"OUT": np.zeros((2, 5), np.float32)})
    assert out.shape == (2, 5)


@pytest.mark.parametrize("array", [np.zeros((3, 2, 1), np.float32), np.float32(1)])
def test_outputs_need_one_row_per_input_row(array: Any) -> None:
    row = {"IN": np.ones((1, 2, 1), np.float32), "TEXT": [["a"]]}
    with pytest.raises(InternalError, match=r"output 'OUT' of model 'm' .* expected the batch size 2"):
        make(PLAIN, row, row).scatter({"OUT": array})


def test_scattered_outputs_must_match_their_shapes() -> None:
    batch = make(RAGGED, {"IN": np.zeros((1, 3, 2), np.float32)})
    with pytest.raises(InternalError, match=r"has 5 elements, .* which have 6"):
        batch.scatter({"OUT": np.zeros(5, np.float32)})


def test_different_shapes_are_not_batched_together() -> None:
    row = {"IN": np.ones((1, 2, 1), np.float32), "TEXT": [["a"]]}
    with pytest.raises(InvalidArgument, match="make no batch"):
        make(PLAIN, row, row | {"IN": np.ones((1, 2, 2), np.float32)})
