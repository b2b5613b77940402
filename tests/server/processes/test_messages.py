"""Requests and responses survive the way through a message."""

from __future__ import annotations

import numpy as np
import pytest

from neso.generation import GenerationRequest, SamplingParams
from neso.server.errors import InvalidArgument, NotFound, Overloaded, Restarting, ServerError, Unavailable
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.processes import messages
from neso.server.tensor import DataType, Tensor


def test_requests():
    tensors = [
        Tensor("a", DataType.FP32, np.arange(6, dtype=np.float32).reshape(2, 3)),
        Tensor("b", DataType.BYTES, np.array([[b"x", b""]], np.object_)),
        Tensor("c", DataType.INT64, np.zeros((0, 4), np.int64)),
    ]
    request = InferenceRequest(
        "model",
        {tensor.name: tensor for tensor in tensors},
        id="seven",
        requested_outputs=("out",),
        parameters={"text": "ä", "number": 3, "flag": True, "ratio": 0.5},
        sequence_id="s",
        sequence_start=True,
        classification={"out": 3},
        client="10.0.0.1",
        input_bytes=99,
        payload=GenerationRequest("hello", SamplingParams(max_tokens=3)),
    )
    sent = messages.decoder.decode(messages.pack_request(5, request, "2", "space"))
    assert isinstance(sent, messages.Infer)
    assert (sent.number, sent.model_version, sent.namespace) == (5, "2", "space")
    read = messages.unpack_request(sent)
    for tensor in tensors:
        assert read.inputs[tensor.name].datatype is tensor.datatype
        np.testing.assert_array_equal(read.inputs[tensor.name].array, tensor.array)
    for name in (
        "id",
        "requested_outputs",
        "parameters",
        "sequence_id",
        "classification",
        "client",
        "payload",
    ):
        assert getattr(read, name) == getattr(request, name)


def test_a_request_that_cannot_be_encoded_is_rejected():
    request = InferenceRequest("model", {}, id="\ud800", client="")
    with pytest.raises(InvalidArgument, match="not supported"):
        messages.pack_request(1, request, "1", "")


def test_responses():
    response = InferenceResponse(
        "model", "1", "id", [Tensor("o", DataType.BOOL, np.array([True, False]))], {"p": 1}, final=True
    )
    read = messages.unpack_response(messages.decoder.decode(messages.pack_response(3, response)))
    np.testing.assert_array_equal(read.output("o").array, [True, False])
    assert (read.model_name, read.parameters, read.final, read.error) == ("model", {"p": 1}, True, None)


@pytest.mark.parametrize("kind", [Overloaded, Restarting, Unavailable, NotFound])
def test_errors_in_responses(kind: type[ServerError]):
    response = InferenceResponse("model", "1", error=kind("full"), final=True)
    read = messages.unpack_response(messages.decoder.decode(messages.pack_response(3, response)))
    assert type(read.error) is kind and read.error.message == "full"
