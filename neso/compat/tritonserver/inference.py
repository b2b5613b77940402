"""Triton's tensors, requests, responses and models, on top of `neso.server.inprocess`."""

from __future__ import annotations

import asyncio
import ctypes
import queue
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from neso.compat.tritonserver.server_options import (
    DataType,
    ModelBatchFlag,
    ModelTxnPropertyFlag,
    RequestFlag,
)
from neso.server.errors import InvalidArgument, ServerError, Unsupported
from neso.server.inference_request import ParameterValue
from neso.server.inference_response import InferenceResponse as CoreResponse
from neso.server.inprocess import AsyncResponseIterator, ResponseIterator
from neso.server.inprocess import InferenceRequest as NesoRequest
from neso.server.inprocess import Model as NesoModel
from neso.server.inprocess.tensor import Device, MemoryBuffer, MemoryType, parse_device
from neso.server.inprocess.tensor import Tensor as NesoTensor
from neso.server.tensor import Tensor as ServerTensor

if TYPE_CHECKING:
    from neso.compat.tritonserver.server import Server


class Tensor(NesoTensor):
    """A tensor over a host memory buffer. Raises `InvalidArgumentError` if the buffer does not match the shape.

    For BYTES tensors the buffer contains the binary tensor format, which is parsed on construction.
    """

    __slots__ = ()

    def __init__(self, data_type: DataType, shape: Sequence[int], memory_buffer: MemoryBuffer) -> None:
        if memory_buffer.memory_type is MemoryType.GPU:
            raise Unsupported("a tensor on a GPU is made by Tensor.from_dlpack(), not over a MemoryBuffer")
        data = np.asarray(_HostMemory(memory_buffer))
        datatype, shape = data_type.neso, tuple(int(extent) for extent in shape)
        super().__init__(ServerTensor.from_wire("", datatype, shape, data.data))

    @classmethod
    def of(cls, tensor: ServerTensor) -> Tensor:
        """Wrap a tensor of a core response."""
        return cls._wrap(tensor)

    @property
    def data_type(self) -> DataType:
        return DataType[self.datatype.name]

    @property
    def shape(self) -> tuple[int, ...]:
        return super().shape

    @shape.setter
    def shape(self, shape: Sequence[int]) -> None:
        """Reshape in place, without a copy. Existing views keep their shape."""
        try:
            if self._host is None:
                self._gpu = self._gpu.reshape(tuple(shape))
            else:
                array = self._host.array.reshape(tuple(shape))
                self._host = ServerTensor(self._host.name, self._host.datatype, array)
        except (ValueError, RuntimeError, TypeError):
            raise InvalidArgument(f"a tensor of shape {self.shape} cannot take shape {shape}") from None

    def __repr__(self) -> str:
        return f"Tensor(data_type={self.data_type!r}, shape={self.shape}, memory_buffer={self.memory_buffer})"


class _HostMemory:
    """Exposes a buffer to numpy as uint8[size] and keeps the buffer's owner alive."""

    def __init__(self, buffer: MemoryBuffer) -> None:
        self._buffer = buffer
        self.__array_interface__: dict[str, Any] = {
            "data": (buffer.data_ptr, False),
            "shape": (buffer.size,),
            "typestr": "|u1",
            "version": 3,
        }


class MemoryAllocator(ABC):
    """Allocates the memory that outputs are copied to. It can return a different memory type than requested."""

    @abstractmethod
    def allocate(
        self, size: int, memory_type: MemoryType, memory_type_id: int, tensor_name: str = ""
    ) -> MemoryBuffer:
        """Return a buffer of at least `size` bytes.

        `tensor_name` may be missing from a subclass's signature, as in some Triton releases.
        """


class NumpyAllocator(MemoryAllocator):
    """Allocates numpy arrays."""

    def allocate(
        self, size: int, memory_type: MemoryType, memory_type_id: int, tensor_name: str = ""
    ) -> MemoryBuffer:
        return MemoryBuffer.from_dlpack(np.empty(size, np.uint8))


default_memory_allocators: dict[MemoryType, MemoryAllocator] = {MemoryType.CPU: NumpyAllocator()}


def _copy_to_allocated(allocator: MemoryAllocator, name: str, tensor: Tensor) -> Tensor:
    """Copy a tensor into a new buffer of `allocator`. Raises `ServerError` if the buffer is unsuitable."""
    arguments = (tensor.size, tensor.memory_type, tensor.memory_type_id)
    try:
        signature(allocator.allocate).bind(*arguments, name)
    except TypeError:
        buffer = allocator.allocate(*arguments)
    else:
        buffer = allocator.allocate(*arguments, name)
    source = tensor.memory_buffer
    if buffer.memory_type is MemoryType.GPU or source.memory_type is MemoryType.GPU:
        raise Unsupported("memory allocators must give memory on the host")
    if buffer.size < source.size:
        raise InvalidArgument(f"the memory allocator gave {buffer.size} bytes of {source.size}")
    ctypes.memmove(buffer.data_ptr, source.data_ptr, source.size)
    if tensor.data_type is DataType.BYTES:
        return tensor  # the elements are Python objects; the buffer contains only their binary form
    return Tensor(tensor.data_type, tensor.shape, replace(buffer, size=tensor.size))


@dataclass
class InferenceResponse:
    """One response of a model. The final response can consist of the final flag only, without outputs."""

    model: Model
    request_id: str | None = None
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    error: ServerError | None = None
    classification_label: str | None = None
    final: bool = False

    @classmethod
    def of(cls, model: Model, response: CoreResponse) -> InferenceResponse:
        """Convert a response of the core."""
        return cls(
            model.at(response.model_version),
            response.id,
            response.parameters,
            {tensor.name: Tensor.of(tensor) for tensor in response.outputs},
            response.error,
            None,
            response.final,
        )


@dataclass
class InferenceRequest:
    """A request to a model, with Triton's field names."""

    model: Model
    request_id: str | None = None
    flags: int = 0
    correlation_id: int | str | None = None
    priority: int = 0
    timeout: int = 0
    inputs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    output_memory_type: Device | None = None
    output_memory_allocator: MemoryAllocator | None = None
    response_queue: queue.SimpleQueue[InferenceResponse] | asyncio.Queue[InferenceResponse] | None = None

    def to_neso(self) -> NesoRequest:
        """Convert to Neso's request. Raises `InvalidArgumentError` for an unknown memory type."""
        if self.output_memory_type is not None:
            parse_device(self.output_memory_type)
        return NesoRequest(
            self.model.neso,
            self.inputs,
            request_id=self.request_id or "",
            parameters=self.parameters,
            priority=self.priority,
            timeout=self.timeout,
            sequence_id=self.correlation_id or 0,
            sequence_start=bool(self.flags & RequestFlag.SEQUENCE_START),
            sequence_end=bool(self.flags & RequestFlag.SEQUENCE_END),
        )

    def to_response(self, response: CoreResponse) -> InferenceResponse:
        """Convert a core response and move its outputs to the requested memory. Raises `TritonError`."""
        converted = InferenceResponse.of(self.model, response)
        for name, tensor in converted.outputs.items():
            if self.output_memory_type is not None:
                tensor = tensor.to_device(self.output_memory_type)
            if self.output_memory_allocator is not None:
                tensor = _copy_to_allocated(self.output_memory_allocator, name, tensor)
            converted.outputs[name] = tensor
        return converted


class Model:
    """A model name and version (-1: the newest ready version). Existence is checked on use."""

    def __init__(
        self,
        server: Server,
        name: str,
        version: int = -1,
        state: str | None = None,
        reason: str | None = None,
    ) -> None:
        self._server = server.neso
        self.neso = NesoModel(self._server, name, "" if version == -1 else str(version))
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def __repr__(self) -> str:
        return str({"name": self.name, "version": self.version, "state": self.state})

    def at(self, version: str) -> Model:
        """Return this model with another version. Also works after the server has stopped."""
        model = copy(self)
        if version:
            model.neso, model.version = NesoModel(self._server, self.name, version), int(version)
        return model

    def create_request(self, **fields: Any) -> InferenceRequest:
        """Create a request to this model from the fields of `InferenceRequest`."""
        return InferenceRequest(**{**fields, "model": self})

    def infer(
        self,
        inference_request: InferenceRequest | None = None,
        raise_on_error: bool = True,
        **fields: Any,
    ) -> ResponseIterator[InferenceResponse]:
        """Send a request. Raises `TritonError`; `InvalidArgumentError` if it does not match the model."""
        request = inference_request or self.create_request(**fields)
        responses = ResponseIterator(
            request.to_response, raise_on_error=raise_on_error, flag_only=True, copies=request.response_queue
        )
        self.neso.send(request.to_neso(), responses)
        return responses

    def async_infer(
        self,
        inference_request: InferenceRequest | None = None,
        raise_on_error: bool = True,
        **fields: Any,
    ) -> AsyncResponseIterator[InferenceResponse]:
        """Like `infer`, for the running event loop."""
        request = inference_request or self.create_request(**fields)
        responses = AsyncResponseIterator(
            request.to_response, raise_on_error=raise_on_error, flag_only=True, copies=request.response_queue
        )
        self.neso.send(request.to_neso(), responses)
        return responses

    def ready(self) -> bool:
        """Return whether the model accepts requests."""
        return self.neso.ready()

    def metadata(self) -> dict[str, Any]:
        """Return name, versions, platform, inputs and outputs in the form of KServe's model metadata."""
        metadata = asdict(self.neso.metadata())
        for tensor in (*metadata["inputs"], *metadata["outputs"]):
            tensor["shape"] = list(tensor["shape"])
        return metadata

    def config(self, config_version: int = 1) -> dict[str, Any]:
        """Return the completed configuration, with the field names of config.pbtxt."""
        return self.neso.config()

    def statistics(self) -> dict[str, Any]:
        """Return counters and durations in the form of the statistics extension."""
        return {"model_stats": [self.neso.statistics()]}

    def batch_properties(self) -> ModelBatchFlag:
        """Return whether the first dimension is a batch dimension."""
        batches = self.config().get("max_batch_size", 0) > 0
        return ModelBatchFlag.FIRST_DIM if batches else ModelBatchFlag.UNKNOWN

    def transaction_properties(self) -> ModelTxnPropertyFlag:
        """Return whether a request gets exactly one response, or any number of responses."""
        decoupled = self.config().get("model_transaction_policy", {}).get("decoupled", False)
        return ModelTxnPropertyFlag.DECOUPLED if decoupled else ModelTxnPropertyFlag.ONE_TO_ONE
