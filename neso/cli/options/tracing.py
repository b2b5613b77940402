"""Traces of requests."""

from __future__ import annotations

from neso.cli.options.kinds import INTEGER, PATH, integer
from neso.cli.options.option import Option, Topic

_TRACING = "tracing"

TRACING = Topic(
    "Tracing",
    (
        Option(
            "trace-config",
            "Setting of the traces, of a mode (triton or opentelemetry) or of all.",
            repeated=True,
            metavar="[MODE,]KEY=VALUE",
            absent=_TRACING,
        ),
        Option("trace-file", "Deprecated: --trace-config triton,file=PATH.", PATH, absent=_TRACING),
        Option(
            "trace-level",
            "Deprecated: --trace-config level=OFF|TIMESTAMPS|TENSORS.",
            repeated=True,
            absent=_TRACING,
        ),
        Option("trace-rate", "Deprecated: --trace-config rate=N.", integer(0), absent=_TRACING),
        Option("trace-count", "Deprecated: --trace-config count=N.", INTEGER, absent=_TRACING),
        Option(
            "trace-log-frequency",
            "Deprecated: --trace-config triton,log-frequency=N.",
            integer(0),
            absent=_TRACING,
        ),
    ),
)
