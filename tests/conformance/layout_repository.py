"""Repositories written by `neso repo init`, and requests to their models."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import np_to_triton_dtype
from typer.testing import CliRunner

from neso.cli.main import app

PROMPT = "What is TTFT?"
ANSWER = " TTFT is the time to first token: how long a client"
"""What the shipped model says to it, greedily, in twelve tokens."""
TYPES = {"max_tokens": np.int32, "beam_width": np.int32, "num_return_sequences": np.int32, "top_k": np.int32}
TYPES |= {"num_draft_tokens": np.int32, "end_id": np.int32, "seed": np.uint64, "min_tokens": np.int32}
TYPES |= {"random_seed": np.uint64, "min_length": np.int32}


def init(directory: Path, *options: str, model: str = "neso-pilot") -> Path:
    """Run the command."""
    result = CliRunner().invoke(
        app, ["repo", "init", "--layout", "trtllm", "--model", model, *options, str(directory)]
    )
    assert result.exit_code == 0, result.output
    return directory


def tensors(batch: int | None, **values: Any) -> list[grpc_client.InferInput]:
    """Repeat each value for `batch` rows; a list of lists has one value per row. None: no batch dimension."""
    inputs = []
    for name, value in values.items():
        row = np.atleast_1d(np.array(value, object if isinstance(value, str) else None))
        if row.dtype.kind in "US":
            row = row.astype(object)
        row = row.astype(TYPES.get(name, np.float32 if row.dtype.kind in "fi" else row.dtype))
        if batch is not None:
            row = row if row.ndim == 2 else np.stack([row] * batch)
        given = grpc_client.InferInput(name, row.shape, np_to_triton_dtype(row.dtype))
        given.set_data_from_numpy(row)
        inputs.append(given)
    return inputs


class Stream:
    """Responses to one request over a gRPC stream."""

    def __init__(
        self, address: str, model: str, inputs: list[grpc_client.InferInput], **options: Any
    ) -> None:
        self._queue: queue.Queue[Any] = queue.Queue()
        self.client = grpc_client.InferenceServerClient(address)
        self.client.start_stream(partial(self._take))
        self.client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)

    def _take(self, result: Any, error: Any) -> None:
        self._queue.put(error or result)

    def next(self) -> Any:
        """Return the next response, or None at the end. Raises its error."""
        result = self._queue.get(timeout=60)
        if isinstance(result, Exception):
            raise result
        if (
            result.get_response().parameters["triton_final_response"].bool_param
            and not result.get_response().outputs
        ):
            return None
        return result

    def all(self) -> list[Any]:
        """Return the remaining responses."""
        results = []
        while (result := self.next()) is not None:
            results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        self.client.close()
        return results


def send_request(address: str, model: str, batch: int | None = 1, **values: Any) -> list[Any]:
    """Return all responses to one request."""
    return Stream(address, model, tensors(batch, **values)).all()


def text(results: list[Any]) -> str:
    """Return the concatenated text of one sequence."""
    return "".join(result.as_numpy("text_output").reshape(-1)[0].decode() for result in results)
