"""A request, as a Python program writes it."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from neso.server.errors import InvalidArgument
from neso.server.inference_request import InferenceRequest as CoreRequest
from neso.server.inference_request import ParameterValue
from neso.server.inference_response import InferenceResponse as CoreResponse
from neso.server.inprocess.flight import Flight
from neso.server.inprocess.memory import Device, parse_device
from neso.server.inprocess.response import InferenceResponse
from neso.server.inprocess.tensor import make_input
from neso.server.model import Model as CoreModel

if TYPE_CHECKING:
    from neso.server.inprocess.model import Model


@dataclass(eq=False)
class InferenceRequest:
    """A request to a model; it may be changed, and sent several times.

    `inputs`: arrays, `Tensor`s, objects with DLPack, lists or scalars, by name. `outputs`: the names of those
    that are wanted, all if empty. `timeout` is in µs, 0 for none. `classification`: outputs to be answered as so
    many of their largest values. `output_memory_type`: where the outputs shall be, as for `Tensor.to_device`.
    `response_queue` gets each response as well as the iterator does, and the final flag where that comes alone: a
    `queue.SimpleQueue` for `infer`, an `asyncio.Queue` for `async_infer`.
    """

    model: Model
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: Iterable[str] = ()
    request_id: str = ""
    parameters: Mapping[str, ParameterValue] | None = None
    priority: int = 0
    timeout: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    classification: Mapping[str, int] | None = None
    output_memory_type: Device | None = None
    response_queue: queue.SimpleQueue[InferenceResponse] | asyncio.Queue[InferenceResponse] | None = None
    _flights: list[Flight] = field(default_factory=list, init=False, repr=False)

    def cancel(self) -> None:
        """Cancel wherever this request was sent and has not ended. From any thread."""
        for flight in self._flights:
            flight.cancel()

    def track(self, flight: Flight) -> None:
        """Let `cancel` reach a flight of this request."""
        self._flights = [other for other in self._flights if not other.ended]
        self._flights.append(flight)

    def maker(self) -> Callable[[CoreResponse], InferenceResponse]:
        """What makes responses to this request. Raises `InvalidArgument` for an unknown kind of memory."""
        if self.output_memory_type is None:
            return InferenceResponse.of
        parse_device(self.output_memory_type)
        return partial(InferenceResponse.on, self.output_memory_type)

    def to_core(self, model: CoreModel, version: str) -> CoreRequest:
        """The core's request for one of its models. Raises `InvalidArgument` if it does not fit the model."""
        specs = model.signature.inputs
        tensors = {
            name: make_input(name, value, specs[name].datatype if name in specs else None)
            for name, value in self.inputs.items()
        }
        request = CoreRequest(
            model.name,
            tensors,
            version,
            self.request_id,
            tuple(self.outputs),
            dict(self.parameters) if self.parameters else {},
            self.priority,
            self.timeout,
            self.sequence_id,
            self.sequence_start,
            self.sequence_end,
        )
        for name, value in request.parameters.items():
            if not isinstance(value, bool | int | float | str):
                raise InvalidArgument(
                    f"parameter '{name}' is {type(value).__name__}, expected a bool, a number or text"
                )
        if self.classification:
            request.classification = dict(self.classification)
        model.signature.validate(request)
        return request
