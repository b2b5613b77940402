"""A traced request, and what it does in each model."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Protocol

from neso.server.tracing.setting import TraceLevel
from neso.server.tracing.tensor_activity import TensorActivity

if TYPE_CHECKING:
    from neso.generation import GenerationRequest
    from neso.server.errors import ServerError
    from neso.server.inference_response import InferenceResponse
    from neso.server.statistics import Timeline
    from neso.server.tensor import Tensor
    from neso.server.tracing.generation_trace import GenerationTrace

Activity = tuple[str, int]
"""A name and when, in ns of the monotonic clock."""

_ids = itertools.count(1)


class TraceParent(Protocol):
    """What the execution of a model can be a part of: a client's request, or the execution of another model."""

    def begin(
        self, model: str, version: str, request_id: str, start: int, inputs: dict[str, Tensor] | None = None
    ) -> ModelTrace | None:
        """A model begins to work for this, at `start`; None when the trace has ended already."""


class TraceSink:
    """Where traces go. It sees each trace and its models when they begin and when they are over.

    `levels`: what it has a use for.
    """

    levels = TraceLevel.TIMESTAMPS | TraceLevel.TENSORS

    def begin(self, trace: Trace) -> None:
        """A trace begins."""

    def begin_model(self, model: ModelTrace) -> None:
        """A model begins to work for a trace."""

    def end_model(self, model: ModelTrace) -> None:
        """A model is through."""

    def end(self, trace: Trace) -> None:
        """The front end and all models are through."""

    def context(self, model: ModelTrace) -> dict[str, str] | None:
        """What others need to make their own part of the trace: W3C's headers. None: they cannot."""
        return None

    def name(self, trace: Trace) -> str:
        """The id by which people find the trace."""
        return str(trace.id)


class Trace:
    """One traced request of a client. Belongs to the core's loop.

    It is over when the one who sampled it has called `end` and all models are through. `span` is the sink's.
    """

    __slots__ = (
        "_open",
        "_sink",
        "activities",
        "clock_offset",
        "id",
        "level",
        "models",
        "parent",
        "span",
        "started",
    )

    def __init__(self, level: TraceLevel, sink: TraceSink, parent: Any = None) -> None:
        self.id = next(_ids)
        self.level = level
        self.parent = parent
        self.started = time.monotonic_ns()
        self.clock_offset = time.time_ns() - self.started
        self.activities: list[Activity] = []
        self.models: list[ModelTrace] = []
        self.span: Any = None
        self._sink = sink
        self._open = 1
        sink.begin(self)

    @property
    def name(self) -> str:
        """The id by which people find the trace."""
        return self._sink.name(self)

    def stamp(self, activity: str, ns: int | None = None) -> None:
        """Note that the front end has done something, now unless `ns` says when."""
        if TraceLevel.TIMESTAMPS in self.level:
            self.activities.append((activity, time.monotonic_ns() if ns is None else ns))

    def sending(self, protocol: str) -> None:
        """The front end begins to send the answer; only the first call is noted."""
        start = f"{protocol}_SEND_START"
        if all(name != start for name, _ in self.activities):
            self.stamp(start)

    def sent(self, protocol: str) -> None:
        """The front end has sent all that it had to send, and is through."""
        self.sending(protocol)
        self.stamp(f"{protocol}_SEND_END")
        self.end()

    def begin(
        self, model: str, version: str, request_id: str, start: int, inputs: dict[str, Tensor] | None = None
    ) -> ModelTrace | None:
        """See `TraceParent`. The first model has the id of the trace, as Triton's root traces."""
        id, parent_id = (next(_ids), self.id) if self.models else (self.id, 0)
        return self.add(ModelTrace(self, self, id, parent_id, (model, version, request_id)), start, inputs)

    def end(self) -> None:
        """The front end is through."""
        self._close()

    # The rest is for the traces of models.

    def add(self, model: ModelTrace, start: int, inputs: dict[str, Tensor] | None) -> ModelTrace | None:
        """Count a model in."""
        if not self._open:
            return None
        self._open += 1
        self.models.append(model)
        model.stamp("REQUEST_START", start)
        self._sink.begin_model(model)
        model.take_tensors("TENSOR_QUEUE_INPUT", inputs)
        return model

    def context(self, model: ModelTrace) -> dict[str, str] | None:
        return self._sink.context(model)

    def model_ended(self, model: ModelTrace) -> None:
        """A model is through."""
        self._sink.end_model(model)
        if not model.parent_id:
            self.stamp("INFER_RESPONSE_COMPLETE")
        self._close()

    def _close(self) -> None:
        self._open -= 1
        if not self._open:
            self._sink.end(self)


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
    def context(self) -> dict[str, str] | None:
        """W3C's headers, for others to make their own part of the trace. From any thread."""
        return self.trace.context(self)

    def begin(
        self, model: str, version: str, request_id: str, start: int, inputs: dict[str, Tensor] | None = None
    ) -> ModelTrace | None:
        """See `TraceParent`."""
        child = ModelTrace(self.trace, self, next(_ids), self.id, (model, version, request_id))
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
