"""Helpers that send requests to a core's models."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt

from neso.server.core import Core
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse, ResponseStream
from neso.server.metadata import IndexEntry
from neso.server.model import Model
from neso.server.tensor import Tensor


def send_request(model: Model, *, id: str = "", **arrays: Any) -> ResponseStream:
    """Submit a request with these arrays."""
    inputs = {name: Tensor.from_numpy(name, array) for name, array in arrays.items()}
    return model.submit(InferenceRequest(model.name, inputs, id=id))


def send_slow_request(model: Model) -> ResponseStream:
    return send_request(model, IN=np.ones(2, np.float32))


def index_of(core: Core, name: str) -> list[IndexEntry]:
    """Return the rows of the repository index for one model."""
    return [entry for entry in core.repository_index() if entry.name == name]


async def collect(stream: ResponseStream) -> list[InferenceResponse]:
    return [response async for response in stream]


async def infer(model: Model, **arrays: Any) -> dict[str, npt.NDArray[Any]]:
    """Return the outputs of a request with these arrays, by name. Raises the error of the response."""
    (response,) = await asyncio.wait_for(collect(send_request(model, **arrays)), 60)
    if response.error is not None:
        raise response.error
    return {tensor.name: tensor.array for tensor in response.outputs}


def reason(core: Core) -> str:
    """Return why the only model of a core could not be loaded."""
    (entry,) = core.repository_index()
    assert entry.state.value == "UNAVAILABLE"
    return entry.reason


def parameters(**values: str) -> str:
    """Return the `parameters` of a config.pbtxt."""
    return "".join(
        f"parameters {{ key: '{key}' value {{ string_value: '{value}' }} }}\n"
        for key, value in values.items()
    )
