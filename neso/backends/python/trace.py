"""`pb_utils.InferenceTrace`: the part of a trace that the execution of a request is."""

from __future__ import annotations

import json
from typing import Protocol


class RequestTrace(Protocol):
    """The trace of a request as its model sees it: the server's own, or what stands for it in another process."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def context(self) -> dict[str, str] | None: ...


class InferenceTrace:
    """What `request.trace()` gives, for `InferenceRequest(trace=…)` and for spans of the model's own."""

    def __init__(self, trace: RequestTrace | None = None) -> None:
        self._trace = trace

    def get_context(self) -> str | None:
        """W3C's `traceparent` (and `tracestate`) as JSON; None unless the request is traced by OpenTelemetry."""
        context = None if self._trace is None else self._trace.context
        return None if context is None else json.dumps(context)

    def to_server(self) -> RequestTrace | None:
        """The trace as the server knows it, or its stand-in; None if there is none."""
        return self._trace
