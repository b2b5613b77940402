"""Helpers of the clients in this folder: named arrays as input tensors, and streamed responses."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Arrays = dict[str, np.ndarray | None]
"""Arrays by tensor name; None for omitted tensors."""
BATCH = 1


def row(value: object, dtype: type) -> np.ndarray:
    """Return a value or a list of values as a batch of one row."""
    return np.array(value, dtype).reshape(BATCH, -1)


def tensors(arrays: Arrays) -> list[grpc.InferInput]:
    """Create input tensors of the arrays that are not None."""
    inputs = []
    for name, array in arrays.items():
        if array is not None:
            inputs.append(grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
    return inputs


class Responses:
    """The responses of requests over one gRPC stream, for any model. Raises the server's errors."""

    def __init__(self, url: str, model: str, inputs: list[grpc.InferInput], **options: object) -> None:
        self._results: queue.SimpleQueue[grpc.InferResult | InferenceServerException] = queue.SimpleQueue()
        self._client = grpc.InferenceServerClient(url)
        self._model = model
        self._open = 0  # requests without a final response
        self._client.start_stream(lambda result, error: self._results.put(error or result))
        self.send(inputs, **options)

    def send(self, inputs: list[grpc.InferInput], **options: object) -> None:
        """Send another request on the same stream; responses are interleaved."""
        self._open += 1
        try:
            self._client.async_stream_infer(self._model, inputs, enable_empty_final_response=True, **options)
        except InferenceServerException as error:
            raise self._cause(error) from None

    def _cause(self, error: InferenceServerException) -> InferenceServerException:
        """Return the error that ended the stream; `error` says only that the stream has ended."""
        try:
            while not isinstance(found := self._results.get(timeout=1), InferenceServerException):
                pass
        except queue.Empty:
            return error
        return found

    def cancel(self) -> None:
        """Cancel all requests."""
        self._client.stop_stream(cancel_requests=True)

    def __iter__(self) -> Iterator[grpc.InferResult]:
        try:
            while self._open:
                result = self._results.get()
                if isinstance(result, Exception):
                    raise result
                response = result.get_response()
                self._open -= response.parameters["triton_final_response"].bool_param
                if response.outputs:
                    yield result
        finally:
            self._client.close()


def lora_arrays(path: str | None, task_id: int | None) -> Arrays:
    """Return the tensors of an adapter: its number, and with `path` its weights, required in the first request."""
    if path and task_id is None:
        raise SystemExit("--lora-path needs --lora-task-id")
    files = {"lora_weights": "model.lora_weights.npy", "lora_config": "model.lora_config.npy"}
    arrays: Arrays = {name: np.load(Path(path) / file) for name, file in files.items() if path}
    return {**arrays, "lora_task_id": None if task_id is None else row(task_id, np.uint64)}
