"""Request tracing: sampling, recording and export of traces."""

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
