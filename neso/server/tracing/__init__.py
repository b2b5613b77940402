"""Traces of single requests: which are taken, what is noted of them, and where they go."""

from neso.server.trace_config import OtelConfig, TraceConfig, TraceLevel, TraceMode, TraceSetting
from neso.server.tracing.trace import ModelTrace, Trace, TraceParent
from neso.server.tracing.tracing import Tracing

__all__ = [
    "ModelTrace",
    "OtelConfig",
    "Trace",
    "TraceConfig",
    "TraceLevel",
    "TraceMode",
    "TraceParent",
    "TraceSetting",
    "Tracing",
]
