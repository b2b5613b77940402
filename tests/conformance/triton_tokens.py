"""Clients of the model `tensorrt_llm`: tritonclient with token ids in and out."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Outputs = dict[str, npt.NDArray[Any]]
TRUE = np.array([[True]])


def i32(*values: Any) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def prompt_inputs(prompt: list[int], length: int, **further: npt.NDArray[Any]) -> Outputs:
    """Return the required inputs of one row, and others."""
    required = {
        "input_ids": i32(prompt),
        "input_lengths": i32([len(prompt)]),
        "request_output_len": i32([length]),
    }
    return required | further


def tensors(values: Outputs, module: Any = grpc) -> list[Any]:
    """Return inputs for a client of this module."""
    inputs = []
    for name, array in values.items():
        inputs.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def outputs(result: Any) -> Outputs:
    return {tensor.name: result.as_numpy(tensor.name) for tensor in result.get_response().outputs}


class TokenStream:
    """A gRPC stream; `receive` returns responses in order of arrival."""

    def __init__(self, client: grpc.InferenceServerClient, model: str) -> None:
        self._client, self._model = client, model
        self._results: queue.Queue[tuple[Any, InferenceServerException | None]] = queue.Queue()
        client.start_stream(lambda result, error: self._results.put((result, error)))

    def send(self, values: Outputs, id: str = "") -> None:
        self._client.async_stream_infer(
            self._model, tensors(values), request_id=id, enable_empty_final_response=True
        )

    def receive(self) -> tuple[str, Outputs, bool]:
        """Return id, outputs, and the final flag. Raises `InferenceServerException`."""
        result, error = self._results.get(timeout=60)
        if error is not None:
            raise error
        response = result.get_response()
        return response.id, outputs(result), response.parameters["triton_final_response"].bool_param

    def send_request(self, values: Outputs, id: str = "") -> list[Outputs]:
        """Return all responses to one request."""
        self.send(values, id)
        responses = []
        while True:
            _, found, final = self.receive()
            responses.append(found)
            if final:
                return responses


@contextmanager
def token_stream(address: str, model: str = "tensorrt_llm") -> Iterator[TokenStream]:
    with grpc.InferenceServerClient(address) as client:
        yield TokenStream(client, model)
        client.stop_stream()


def new_tokens(responses: list[Outputs], sequence: int = 0) -> list[int]:
    """Return the tokens of one sequence in the responses of a stream."""
    mine = (r for r in responses if r.get("sequence_index", [[0]])[0][0] == sequence)
    return [token for response in mine for token in response["output_ids"][0, 0].tolist()]
