"""Export of traces as OpenTelemetry spans (OTLP over HTTP)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from neso.generation.spans import Span
from neso.server.errors import Unsupported
from neso.server.trace_config import OtelConfig, TraceLevel
from neso.server.tracing.trace import ModelTrace, Trace, TraceSink

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise Unsupported(
        f"trace mode 'opentelemetry' needs OpenTelemetry, which is missing: pip install 'neso-server[otel]' ({error})"
    ) from None

FLUSH_TIMEOUT = 3.0
"""Timeout for exporting the last spans when the server stops, in seconds."""

MIN_SCHEDULE_DELAY = 1
"""Delay between exports for `bsp_schedule_delay` 0, in ms: the processor requires a positive delay."""


class OtelSink(TraceSink):
    """Span hierarchy: InferRequest ─ model name ─ compute, with activities as events; called models are child spans.

    Spans of requests and models start immediately, because their ids are propagated. All other spans are created at the
    end of a trace. Tensors are not exported.
    """

    levels = TraceLevel.TIMESTAMPS

    def __init__(self, config: OtelConfig) -> None:
        self.config = config
        attributes: dict[str, Any] = dict(config.resource)
        if "service.name" not in OTELResourceDetector().detect().attributes:
            attributes.setdefault("service.name", "neso")
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint=config.endpoint)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=config.bsp_max_queue_size,
                schedule_delay_millis=max(config.bsp_schedule_delay, MIN_SCHEDULE_DELAY),
                max_export_batch_size=min(config.bsp_max_export_batch_size, config.bsp_max_queue_size),
            )
        )
        self._tracer = self._provider.get_tracer("neso")
        self._propagator = TraceContextTextMapPropagator()

    def parent(self, header: Callable[[str], str | None]) -> Any:
        """Return the trace context in the request headers; None if there is no valid context."""
        carrier = {name: value for name in ("traceparent", "tracestate") if (value := header(name))}
        if "traceparent" not in carrier:
            return None
        context = self._propagator.extract(carrier)
        return context if get_current_span(context).get_span_context().is_valid else None

    def is_sampled(self, parent: Any) -> bool:
        """Return whether the context belongs to a sampled trace."""
        return parent is not None and get_current_span(parent).get_span_context().trace_flags.sampled

    def begin(self, trace: Trace) -> None:
        trace.span = self._tracer.start_span(
            "InferRequest", trace.parent, SpanKind.SERVER, start_time=trace.started + trace.clock_offset
        )

    def begin_model(self, model: ModelTrace) -> None:
        offset = model.trace.clock_offset
        start = model.activities[0][1] if model.activities else model.trace.started
        attributes: dict[str, Any] = {
            "triton.model_name": model.model_name,
            "triton.model_version": int(model.model_version),
            "triton.trace_id": model.id,
            "triton.trace_parent_id": model.parent_id,
        }
        if model.request_id:
            attributes["triton.request_id"] = model.request_id
        context = set_span_in_context(model.parent.span)
        model.span = self._tracer.start_span(
            model.model_name, context, attributes=attributes, start_time=start + offset
        )

    def end_model(self, model: ModelTrace) -> None:
        offset, span = model.trace.clock_offset, model.span
        compute = [(name, ns) for name, ns in model.activities if name.startswith("COMPUTE_")]
        others = [activity for activity in model.activities if activity not in compute]
        for name, ns in sorted(others, key=lambda activity: activity[1]):
            span.add_event(name, timestamp=ns + offset)
        span.set_attributes(model.attributes)
        if model.error is not None:
            span.set_status(Status(StatusCode.ERROR, model.error.message))
        self._add_parts(model, compute)
        span.end(model.activities[-1][1] + offset if model.activities else None)

    def end(self, trace: Trace) -> None:
        for name, ns in trace.activities:
            trace.span.add_event(name, timestamp=ns + trace.clock_offset)
        failed = next((model.error for model in trace.models if model.error and not model.parent_id), None)
        if failed is not None:
            trace.span.set_status(Status(StatusCode.ERROR, failed.message))
        trace.span.end(time.monotonic_ns() + trace.clock_offset)

    def context(self, model: ModelTrace) -> dict[str, str] | None:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(model.span))
        return carrier

    def name(self, trace: Trace) -> str:
        return format(trace.span.get_span_context().trace_id, "032x")

    def close(self) -> None:
        """Export the remaining spans and end the exporter thread. Blocks."""
        # The processor waits for the exporter's retries, which stop when the exporter is shut down.
        give_up = threading.Timer(FLUSH_TIMEOUT, self._exporter.shutdown)
        give_up.start()
        self._provider.shutdown()
        give_up.cancel()

    def _add_parts(self, model: ModelTrace, compute: list[tuple[str, int]]) -> None:
        """Create the child spans of a model: compute with its phases, and the phases before it."""
        offset = model.trace.clock_offset
        inside = set_span_in_context(model.span)
        for phase in model.phases:
            if not compute or phase.start_ns < compute[0][1]:
                self._add_phase(phase, inside, offset)
        if not compute:
            return
        span = self._tracer.start_span("compute", inside, start_time=compute[0][1] + offset)
        for name, ns in compute:
            span.add_event(name, timestamp=ns + offset)
        inside = set_span_in_context(span)
        for phase in model.phases:
            if phase.start_ns >= compute[0][1]:
                self._add_phase(phase, inside, offset)
        span.end(compute[-1][1] + offset)

    def _add_phase(self, phase: Span, parent: Context, offset: int) -> None:
        attributes = {f"neso.{name}": value for name, value in phase.attributes.items()}
        span = self._tracer.start_span(
            phase.name, parent, attributes=attributes, start_time=phase.start_ns + offset
        )
        if phase.error:
            span.set_status(Status(StatusCode.ERROR, phase.error))
        span.end(phase.end_ns + offset)
