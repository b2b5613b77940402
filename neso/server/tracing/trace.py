"""Traces of requests and of their model executions."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from neso.generation import GenerationOutput, GenerationRequest, Span
from neso.server.tensor import DataType, Tensor
from neso.server.trace_config import TraceLevel

if TYPE_CHECKING:
    from neso.server.errors import ServerError
    from neso.server.inference_response import InferenceResponse
    from neso.server.statistics import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class TensorSnapshot:
    """A copy of a tensor at some point of the execution. `size`: its bytes."""

    activity: str
    name: str
    datatype: DataType
    array: npt.NDArray[Any]
    size: int

    @classmethod
    def of(cls, activity: str, tensor: Tensor) -> TensorSnapshot:
        return cls(activity, tensor.name, tensor.datatype, np.array(tensor.array), tensor.byte_size)

    def as_dict(self) -> dict[str, str]:
        """Convert to the format of Triton's trace files, where all values are strings."""
        return {
            "name": self.name,
            "data": ",".join(self._elements()),
            "shape": ",".join(map(str, self.array.shape)),
            "dtype": self.datatype.value,
        }

    def _elements(self) -> list[str]:
        flat = self.array.reshape(-1)
        if self.datatype is DataType.BYTES:
            return [f'"{element.decode(errors="replace")}"' for element in flat]
        if self.datatype is DataType.BOOL:
            flat = flat.astype(np.uint8)
        return [str(element) for element in flat]  # the shortest exact representation


class TraceSink:
    """Destination of traces, notified of the start and end of each trace and its model executions.

    `levels`: the supported trace levels.
    """

    levels = TraceLevel.TIMESTAMPS | TraceLevel.TENSORS

    def begin(self, trace: Trace) -> None:
        """Called when a trace starts."""

    def begin_model(self, model: ModelTrace) -> None:
        """Called when a model execution starts."""

    def end_model(self, model: ModelTrace) -> None:
        """Called when a model execution has ended."""

    def end(self, trace: Trace) -> None:
        """Called when the frontend and all model executions have ended."""

    def retire(self) -> None:
        """Called when a setting that produced traces was replaced."""

    def context(self, model: ModelTrace) -> dict[str, str] | None:
        """Return W3C trace-context headers for spans of other services; None if not supported."""
        return None

    def name(self, trace: Trace) -> str:
        """Return the trace id for logs."""
        return str(trace.id)


class GenerationTrace:
    """Phases (queue, prefill, decode) and OpenTelemetry GenAI attributes of a text generation in a trace.

    The phases of a model on workers are the spans that were added.
    """

    def __init__(self, trace: ModelTrace, request: GenerationRequest) -> None:
        self._trace = trace
        self._started = time.monotonic_ns()
        self._scheduled = 0
        self._first_token = 0
        self._finish_reasons: dict[int, str] = {}
        self._spans: list[Span] = []
        trace.attributes.update(_request_attributes(trace.model_name, request))

    @property
    def context(self) -> str:
        """See `SpanSink`."""
        return (self._trace.context or {}).get("traceparent") or self._trace.name

    def add_span(self, span: Span) -> None:
        """See `SpanSink`."""
        self._spans.append(span)

    def observe(self, output: GenerationOutput) -> None:
        """Record an output."""
        if not self._first_token:
            self._first_token = time.monotonic_ns()
            self._scheduled = output.scheduled_ns or self._started
        for delta in output.deltas:
            if delta.finish_reason is not None:
                self._finish_reasons[delta.index] = delta.finish_reason.value
        attributes, usage = self._trace.attributes, output.usage
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        attributes["gen_ai.response.id"] = output.request_id

    def end(self, now: int) -> None:
        """Record the end of the generation."""
        trace = self._trace
        if self._finish_reasons:
            reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
            trace.attributes["gen_ai.response.finish_reasons"] = reasons
        if self._first_token:
            first_chunk = (self._first_token - self._started) * 1e-9
            trace.attributes["gen_ai.response.time_to_first_chunk"] = first_chunk
        if self._spans:
            trace.phases += self._spans
            return
        if not self._first_token:
            trace.phases.append(Span("queue", self._started, now))  # the end of the wait is unknown
            return
        trace.phases.append(Span("queue", self._started, self._scheduled))
        trace.phases.append(Span("prefill", self._scheduled, self._first_token))
        trace.phases.append(Span("decode", self._first_token, now))


def _request_attributes(model: str, request: GenerationRequest) -> dict[str, Any]:
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "neso",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    optional = {
        "gen_ai.request.choice.count": sampling.n if sampling.n > 1 else None,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.stop_sequences": list(sampling.stop) or None,
        "gen_ai.request.top_k": float(sampling.top_k) if sampling.top_k > 0 else None,
    }
    return attributes | {name: value for name, value in optional.items() if value is not None}


Activity = tuple[str, int]
"""Name and time, in ns of the monotonic clock."""

next_id = itertools.count(1).__next__
"""Execution ids; the id of a child is greater than its parent's id."""


class TraceParent(Protocol):
    """Parent of a model execution in a trace: a client request, or the execution of another model."""

    def begin(
        self, model: str, version: str, request_id: str, start: int, inputs: dict[str, Tensor] | None = None
    ) -> ModelTrace | None:
        """Start tracing a model execution at `start`. Returns None if the trace has ended."""


class ModelTrace:
    """One model execution in a trace; executions caused by it are its children.

    `phases`: parts of the execution. `attributes`: additional attributes of its span.
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
        self.tensors: list[TensorSnapshot] = []
        self.phases: list[Span] = []
        self.attributes: dict[str, Any] = {}
        self.generation: GenerationTrace | None = None
        self.error: ServerError | None = None
        self.ended = False
        self.span: Any = None

    @property
    def name(self) -> str:
        """The trace id for logs."""
        return self.trace.name

    @property
    def context(self) -> dict[str, str] | None:
        """Return W3C trace-context headers for spans of other services. Thread-safe."""
        return self.trace.context(self)

    def begin(
        self, model: str, version: str, request_id: str, start: int, inputs: dict[str, Tensor] | None = None
    ) -> ModelTrace | None:
        """See `TraceParent`."""
        child = ModelTrace(self.trace, self, next_id(), self.id, (model, version, request_id))
        return self.trace.add(child, start, inputs)

    def begin_generation(self, request: GenerationRequest) -> GenerationTrace:
        """Start tracing a text generation."""
        self.generation = GenerationTrace(self, request)
        return self.generation

    def stamp(self, activity: str, ns: int) -> None:
        """Record an activity."""
        if TraceLevel.TIMESTAMPS in self.trace.level:
            self.activities.append((activity, ns))

    def record_tensors(self, activity: str, tensors: dict[str, Tensor] | None) -> None:
        """Record copies of tensors."""
        if tensors and TraceLevel.TENSORS in self.trace.level:
            here = (tensor for tensor in tensors.values() if tensor.has_elements)
            self.tensors += [TensorSnapshot.of(activity, tensor) for tensor in here]

    def observe(
        self, timeline: Timeline, response: InferenceResponse, inputs: dict[str, Tensor] | None = None
    ) -> None:
        """Record a response; the final one ends the execution. `inputs`: as passed to the backend."""
        if response.final and timeline.executed:
            self.record_tensors("TENSOR_BACKEND_INPUT", inputs)
        self.record_tensors("TENSOR_BACKEND_OUTPUT", {tensor.name: tensor for tensor in response.outputs})
        if response.final:
            self.end(timeline, response.error)

    def end(self, timeline: Timeline, error: ServerError | None = None) -> None:
        """End the execution. Idempotent."""
        if self.ended:
            return
        self.ended = True
        self.error = error
        now = time.monotonic_ns()
        if self.generation is not None:
            self.generation.end(now)
        self.stamp("QUEUE_START", timeline.queue_start)
        if timeline.executed:
            self.stamp("COMPUTE_START", timeline.compute_start)
            self.stamp("COMPUTE_INPUT_END", timeline.input_end or timeline.compute_start)
            self.stamp("COMPUTE_OUTPUT_START", timeline.output_start or now)
            self.stamp("COMPUTE_END", now)
        self.stamp("REQUEST_END", now)
        self.trace.model_ended(self)


class Trace:
    """A traced client request. Used on the core's loop.

    Starts at `start`, in ns of the monotonic clock, or now. Ends when the frontend has called `end` and all model
    executions have ended. `clock_offset` converts to Unix time. `parent` and `span` belong to the sink.
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

    def __init__(self, level: TraceLevel, sink: TraceSink, parent: Any = None, start: int = 0) -> None:
        self.id = next_id()
        self.level = level
        self.parent = parent
        now = time.monotonic_ns()
        self.clock_offset = time.time_ns() - now
        self.started = start or now
        self.activities: list[Activity] = []
        self.models: list[ModelTrace] = []
        self.span: Any = None
        self._sink = sink
        self._open = 1
        sink.begin(self)

    @property
    def name(self) -> str:
        """The trace id for logs."""
        return self._sink.name(self)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the recorded tensors."""
        return sum(tensor.size for model in self.models for tensor in model.tensors)

    def stamp(self, activity: str, ns: int | None = None) -> None:
        """Record a frontend activity at `ns`, by default now."""
        if TraceLevel.TIMESTAMPS in self.level:
            self.activities.append((activity, time.monotonic_ns() if ns is None else ns))

    def sending(self, protocol: str) -> None:
        """Record the start of sending the response; only the first call counts."""
        start = f"{protocol}_SEND_START"
        if all(name != start for name, _ in self.activities):
            self.stamp(start)

    def sent(self, protocol: str) -> None:
        """Record the end of sending the response, and end the trace for the frontend."""
        self.sending(protocol)
        self.stamp(f"{protocol}_SEND_END")
        self.end()

    def begin(
        self, model: str, version: str, request_id: str, start: int, inputs: dict[str, Tensor] | None = None
    ) -> ModelTrace | None:
        """See `TraceParent`. The first execution has the id of the trace, as in Triton."""
        id, parent_id = (next_id(), self.id) if self.models else (self.id, 0)
        return self.add(ModelTrace(self, self, id, parent_id, (model, version, request_id)), start, inputs)

    def end(self) -> None:
        """End the trace for the frontend."""
        self._close()

    # Used by `ModelTrace`.

    def add(self, model: ModelTrace, start: int, inputs: dict[str, Tensor] | None) -> ModelTrace | None:
        """Add a model execution."""
        if not self._open:
            return None
        self._open += 1
        self.models.append(model)
        model.stamp("REQUEST_START", start)
        self._sink.begin_model(model)
        model.record_tensors("TENSOR_QUEUE_INPUT", inputs)
        return model

    def context(self, model: ModelTrace) -> dict[str, str] | None:
        return self._sink.context(model)

    def model_ended(self, model: ModelTrace) -> None:
        """Called when a model execution has ended."""
        self._sink.end_model(model)
        if not model.parent_id:
            self.stamp("INFER_RESPONSE_COMPLETE")
        self._close()

    def _close(self) -> None:
        self._open -= 1
        if not self._open:
            self._sink.end(self)
