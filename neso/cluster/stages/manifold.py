"""The manifold: passes results of one stage to the next one.

A worker keeps large outputs that another stage reads, and its response only refers to them. The server puts these
references into the request to the next stage, whose worker reads the tensors from the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

import neso.server.processes.messages as wire
from neso.cluster.stages.messages import Durations, Outcome, Release, Task
from neso.cluster.stages.tensors import (
    MIN_KEPT_BYTES,
    Held,
    RemoteArray,
    TensorRef,
    TensorStore,
    map_tensor,
    remote_ref,
)
from neso.server.errors import LostTensor
from neso.server.inference_request import InferenceRequest
from neso.server.inference_response import InferenceResponse
from neso.server.tensor import DataType, Tensor

# -- the server's side ------------------------------------------------------------------------------------------


class Manifold:
    """The server's side: requests with references, and responses with references.

    - knows: whether the worker of this name is connected
    - send: sends it a message
    """

    def __init__(self, knows: Callable[[str], bool], send: Callable[[str, msgspec.Struct], None]) -> None:
        self._knows, self._send = knows, send
        self._loop = asyncio.get_running_loop()

    def pack(self, number: int, attempt: int, request: InferenceRequest, version: str) -> Task:
        """Encode a request. Raises `LostTensor` if the worker that keeps an input is lost, and `InvalidArgument`."""
        refs = {
            name: ref for name, tensor in request.inputs.items() if (ref := remote_ref(tensor)) is not None
        }
        for name, ref in refs.items():
            if not self._knows(ref.worker):
                raise LostTensor(f"input '{name}' is lost: worker '{ref.worker}' has ended")
        if refs:
            own = {name: tensor for name, tensor in request.inputs.items() if name not in refs}
            request, keep = replace(request, inputs=own), request.kept_outputs
        else:
            keep = request.kept_outputs
        encoded = wire.pack_request(number, request, version, "")
        return Task(number, attempt, msgspec.Raw(encoded), refs, keep)

    def hosts(self, request: InferenceRequest) -> set[str]:
        """Return the hosts that keep inputs."""
        refs = (remote_ref(tensor) for tensor in request.inputs.values())
        return {ref.host for ref in refs if ref is not None}

    def unpack(self, outcome: Outcome) -> InferenceResponse:
        """Decode a response. Raises `ValueError`."""
        message = wire.decoder.decode(outcome.response)
        if not isinstance(message, wire.Response) or message.result:  # a result would be unpickled
            raise ValueError("it is not the response of a model with tensors")
        response = wire.unpack_response(message)
        response.created_ns = time.monotonic_ns()  # the clock of another host is different
        elements = {tensor.name: tensor.array for tensor in response.outputs}
        for name, ref in outcome.refs.items():
            array = RemoteArray.of(Held(ref, self._release_soon), elements.get(name))
            response.outputs = [tensor for tensor in response.outputs if tensor.name != name]
            response.outputs.append(Tensor(name, DataType(ref.datatype), array))
        return response

    def _release_soon(self, ref: TensorRef) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._send, ref.worker, Release([ref.number]))


# -- a worker's side --------------------------------------------------------------------------------------------


def unpack_request(task: Task) -> InferenceRequest:
    """Decode a request, without the inputs that other workers keep. Raises `ValueError`."""
    message = wire.decoder.decode(task.request)
    if not isinstance(message, wire.Infer) or message.payload:  # a payload would be unpickled
        raise ValueError("it is no request with tensors")
    request = wire.unpack_request(message)
    request.client = ""  # the server has counted it
    request.classification = {}  # the server classifies
    return request


def add_mapped(request: InferenceRequest, name: str, ref: TensorRef) -> bool:
    """Add an input that a worker of this host keeps. Returns False if it cannot be mapped."""
    tensor = map_tensor(name, ref)
    if tensor is not None:
        request.inputs[name] = tensor
    return tensor is not None


def pack_response(
    task: Task, response: InferenceResponse, store: TensorStore, durations: Durations | None
) -> Outcome:
    """Encode a response. Large outputs that another stage reads stay in the store."""
    refs: dict[str, TensorRef] = {}
    if task.keep:
        outputs = []
        for tensor in response.outputs:
            wanted = task.keep.get(tensor.name)
            large = wanted is not None and tensor.byte_size >= MIN_KEPT_BYTES
            ref = store.keep(tensor) if large else None
            if ref is not None:
                refs[tensor.name] = ref
            if ref is None or wanted:
                outputs.append(tensor)
        response.outputs = outputs
    encoded = wire.pack_response(task.number, response)
    return Outcome(task.number, task.attempt, msgspec.Raw(encoded), durations, refs)
