"""Triton's request."""

from __future__ import annotations

import asyncio
import queue
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from neso.compat.tritonserver.allocators import MemoryAllocator, allocated
from neso.compat.tritonserver.enums import RequestFlag
from neso.compat.tritonserver.response import InferenceResponse
from neso.server.inference_request import ParameterValue
from neso.server.inference_response import InferenceResponse as CoreResponse
from neso.server.inprocess import InferenceRequest as NesoRequest
from neso.server.inprocess.tensor import Device, parse_device

if TYPE_CHECKING:
    from neso.compat.tritonserver.model import Model


@dataclass
class InferenceRequest:
    """A request to a model, by Triton's names."""

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
        """The same for Neso. Raises `InvalidArgumentError` for an unknown kind of memory."""
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

    def respond(self, response: CoreResponse) -> InferenceResponse:
        """A response to this request, its outputs where they were asked for. Raises `TritonError`."""
        made = InferenceResponse.of(self.model, response)
        for name, tensor in made.outputs.items():
            if self.output_memory_type is not None:
                tensor = tensor.to_device(self.output_memory_type)
            if self.output_memory_allocator is not None:
                tensor = allocated(self.output_memory_allocator, name, tensor)
            made.outputs[name] = tensor
        return made
