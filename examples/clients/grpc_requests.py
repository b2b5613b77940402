"""What the clients beside this file share: named arrays as the tensors of a request, and its responses as they come."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Arrays = dict[str, np.ndarray | None]
"""By the names of tensors; None for those that are not given."""
BATCH = 1


def row(value: object, dtype: type) -> np.ndarray:
    """A value, or a list of them, as a batch of one row."""
    return np.array(value, dtype).reshape(BATCH, -1)


def tensors(arrays: Arrays) -> list[grpc.InferInput]:
    """Those that are not None."""
    inputs = []
    for name, array in arrays.items():
        if array is not None:
            inputs.append(grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
    return inputs


class Responses:
    """Of one request over a stream, which serves decoupled models and others. Raises what the server says is wrong."""

    def __init__(self, url: str, model: str, inputs: list[grpc.InferInput], **options: object) -> None:
        self._results: queue.SimpleQueue[grpc.InferResult | InferenceServerException] = queue.SimpleQueue()
        self._client = grpc.InferenceServerClient(url)
        self._model = model
        self._open = 0  # requests that have not had their last response
        self._client.start_stream(lambda result, error: self._results.put(error or result))
        self.send(inputs, **options)

    def send(self, inputs: list[grpc.InferInput], **options: object) -> None:
        """Another request on the same stream; its responses come among the others."""
        self._open += 1
        try:
            self._client.async_stream_infer(self._model, inputs, enable_empty_final_response=True, **options)
        except InferenceServerException as error:
            raise self._cause(error) from None

    def _cause(self, error: InferenceServerException) -> InferenceServerException:
        """What broke the stream, which is told among the results, of the error that it is broken."""
        try:
            while not isinstance(found := self._results.get(timeout=1), InferenceServerException):
                pass
        except queue.Empty:
            return error
        return found

    def cancel(self) -> None:
        """The rest is not wanted."""
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
    """The weights of an adapter in the folder `path`, needed the first time, and the number that it is known by."""
    if path and task_id is None:
        raise SystemExit("--lora-path needs --lora-task-id")
    files = {"lora_weights": "model.lora_weights.npy", "lora_config": "model.lora_config.npy"}
    arrays: Arrays = {name: np.load(Path(path) / file) for name, file in files.items() if path}
    return {**arrays, "lora_task_id": None if task_id is None else row(task_id, np.uint64)}
