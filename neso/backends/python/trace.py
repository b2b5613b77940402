"""`pb_utils.InferenceTrace`: the part of a trace that the execution of a request is."""

from __future__ import annotations

import json

from neso.server.tracing import ModelTrace


class InferenceTrace:
    """What `request.trace()` gives, for `InferenceRequest(trace=…)` and for spans of the model's own."""

    def __init__(self, trace: ModelTrace | None = None) -> None:
        self._trace = trace

    def get_context(self) -> str | None:
        """W3C's `traceparent` (and `tracestate`) as JSON; None unless the request is traced by OpenTelemetry."""
        context = None if self._trace is None else self._trace.context
        return None if context is None else json.dumps(context)

    def to_server(self) -> ModelTrace | None:
        """The trace as the core knows it, None if there is none."""
        return self._trace
