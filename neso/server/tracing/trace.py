"""A traced request of a client."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from neso.server.trace_config import TraceLevel
from neso.server.tracing.model_trace import Activity, ModelTrace, next_id
from neso.server.tracing.trace_sink import TraceSink

if TYPE_CHECKING:
    from neso.server.tensor import Tensor


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
