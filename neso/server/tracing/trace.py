"""Traces of single requests and of the model executions they cause."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from neso.generation import GenerationOutput, GenerationRequest
from neso.server.tensor import DataType, Tensor
from neso.server.trace_config import TraceLevel

if TYPE_CHECKING:
    from neso.server.errors import ServerError
    from neso.server.inference_response import InferenceResponse
    from neso.server.statistics import Timeline


@dataclass(frozen=True, slots=True, eq=False)
class TensorActivity:
    """A copy of a tensor's elements at some point of the execution: where it came by may change."""

    activity: str
    name: str
    datatype: DataType
    array: npt.NDArray[Any]

    @classmethod
    def of(cls, activity: str, tensor: Tensor) -> TensorActivity:
        return cls(activity, tensor.name, tensor.datatype, np.array(tensor.array))

    def as_dict(self) -> dict[str, str]:
        """In the form of Triton's trace files: all of it text."""
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
        return [str(element) for element in flat]  # numpy's scalars have the shortest text that is exact


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

    def retire(self) -> None:
        """A setting that gave traces is no longer in force."""

    def context(self, model: ModelTrace) -> dict[str, str] | None:
        """What others need to make their own part of the trace: W3C's headers. None: they cannot."""
        return None

    def name(self, trace: Trace) -> str:
        """The id by which people find the trace."""
        return str(trace.id)


class GenerationTrace:
    """Follows one generation: it waits, its prompt is computed (prefill), then it goes token by token (decode)."""

    def __init__(self, trace: ModelTrace, request: GenerationRequest) -> None:
        self._trace = trace
        self._started = time.monotonic_ns()
        self._scheduled = 0
        self._first_token = 0
        self._finish_reasons: dict[int, str] = {}
        trace.attributes.update(_request_attributes(trace.model_name, request))

    def observe(self, output: GenerationOutput) -> None:
        """An output has come."""
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
        """There will be no more outputs."""
        trace = self._trace
        if self._finish_reasons:
            reasons = [reason for _, reason in sorted(self._finish_reasons.items())]
            trace.attributes["gen_ai.response.finish_reasons"] = reasons
        if not self._first_token:
            trace.phases.append(("queue", self._started, now))  # how long of it in the queue, nobody has told
            return
        trace.attributes["gen_ai.response.time_to_first_chunk"] = (self._first_token - self._started) * 1e-9
        trace.phases.append(("queue", self._started, self._scheduled))
        trace.phases.append(("prefill", self._scheduled, self._first_token))
        trace.phases.append(("decode", self._first_token, now))


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


class Trace:
    """One traced request of a client. Belongs to the core's loop.

    It is over when the one who sampled it has called `end` and all models are through. It begins at `start`, in ns of
    the monotonic clock, or now; `clock_offset` makes times of day of such times. `parent` and `span` are the sink's.
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
        id, parent_id = (next_id(), self.id) if self.models else (self.id, 0)
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
