"""Helpers that send requests to a core's models."""

from __future__ import annotations

from typing import Any

import numpy as np

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
