"""What one execution of a model does for a traced request."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

from neso.server.trace_config import TraceLevel
from neso.server.tracing.tensor_activity import TensorActivity

if TYPE_CHECKING:
    from neso.generation import GenerationRequest
    from neso.server.errors import ServerError
    from neso.server.inference_response import InferenceResponse
    from neso.server.statistics import Timeline
    from neso.server.tensor import Tensor
    from neso.server.tracing.generation_trace import GenerationTrace
    from neso.server.tracing.trace import Trace

Activity = tuple[str, int]
"""A name and when, in ns of the monotonic clock."""

next_id = itertools.count(1).__next__
"""Executions are told apart by numbers, a child's above its parent's."""


class TraceParent(Protocol):
    """What the execution of a model can be a part of: a client's request, or the execution of another model."""

    def begin(
        self, model: str, version: str, request_id: str, start: int, inputs: dict[str, Tensor] | None = None
    ) -> ModelTrace | None:
        """A model begins to work for this, at `start`; None when the trace has ended already."""


class ModelTrace:
    """What one execution of a model does for a trace; executions that it causes are its children.

    `phases` are parts of the execution, by name, start and end; `attributes` what else there is to tell of it.
    """

    __slots__ = (
        "activities",
        "attributes",
        "ended",
        "error",
        "generation",
        "id",
        "model_name",
        "model_version",
        "parent",
        "parent_id",
        "phases",
        "request_id",
        "span",
        "tensors",
        "trace",
    )

    def __init__(
        self,
        trace: Trace,
        parent: Trace | ModelTrace,
        id: int,
        parent_id: int,
        names: tuple[str, str, str],
    ) -> None:
        self.trace = trace
        self.parent = parent
        self.id = id
        self.parent_id = parent_id
        self.model_name, self.model_version, self.request_id = names
        self.activities: list[Activity] = []
        self.tensors: list[TensorActivity] = []
        self.phases: list[tuple[str, int, int]] = []
        self.attributes: dict[str, Any] = {}
        self.generation: GenerationTrace | None = None
        self.error: ServerError | None = None
        self.ended = False
        self.span: Any = None

    @property
    def name(self) -> str:
        """The id by which people find the trace."""
        return self.trace.name

    @property
    def context(self) -> dict[str, str] | None:
        """W3C's headers, for others to make their own part of the trace. From any thread."""
        return self.trace.context(self)

    def begin(
        self, model: str, version: str, request_id: str, start: int, inputs: dict[str, Tensor] | None = None
    ) -> ModelTrace | None:
        """See `TraceParent`."""
        child = ModelTrace(self.trace, self, next_id(), self.id, (model, version, request_id))
        return self.trace.add(child, start, inputs)

    def begin_generation(self, request: GenerationRequest) -> GenerationTrace:
        """Follow the generation of text from here on."""
        from neso.server.tracing.generation_trace import GenerationTrace

        self.generation = GenerationTrace(self, request)
        return self.generation

    def stamp(self, activity: str, ns: int) -> None:
        """Note an activity."""
        if TraceLevel.TIMESTAMPS in self.trace.level:
            self.activities.append((activity, ns))

    def take_tensors(self, activity: str, tensors: dict[str, Tensor] | None) -> None:
        """Note tensors as they are now."""
        if tensors and TraceLevel.TENSORS in self.trace.level:
            self.tensors += [TensorActivity.of(activity, tensor) for tensor in tensors.values()]

    def observe(
        self, timeline: Timeline, response: InferenceResponse, inputs: dict[str, Tensor] | None = None
    ) -> None:
        """A response leaves the model; the final one ends this. `inputs` are those that the backend has seen."""
        if response.final and timeline.compute_start:
            self.take_tensors("TENSOR_BACKEND_INPUT", inputs)
        self.take_tensors("TENSOR_BACKEND_OUTPUT", {tensor.name: tensor for tensor in response.outputs})
        if response.final:
            self.end(timeline, response.error)

    def end(self, timeline: Timeline, error: ServerError | None = None) -> None:
        """The execution is over. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        now = time.monotonic_ns()
        if self.generation is not None:
            self.generation.end(now)
        self.stamp("QUEUE_START", timeline.queue_start)
        if timeline.compute_start:
            self.stamp("COMPUTE_START", timeline.compute_start)
            self.stamp("COMPUTE_INPUT_END", timeline.input_end or timeline.compute_start)
            self.stamp("COMPUTE_OUTPUT_START", timeline.output_start or now)
            self.stamp("COMPUTE_END", now)
        self.stamp("REQUEST_END", now)
        self.trace.model_ended(self)
