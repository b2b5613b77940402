"""Traces of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.cli.options.kinds import INTEGER, integer
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.server.tracing import TraceConfig

TRACING = Topic(
    "Tracing",
    (
        Option(
            "trace-config",
            "mode=triton|opentelemetry, level=OFF|TIMESTAMPS|TENSORS, rate=N, count=N, triton,file=PATH, "
            "triton,log-frequency=N, opentelemetry,url=URL, opentelemetry,resource=KEY=VALUE.",
            repeated=True,
            metavar="[MODE,]KEY=VALUE",
        ),
        Option("trace-file", "Deprecated: --trace-config triton,file=PATH.", metavar="FILE"),
        Option("trace-level", "Deprecated: --trace-config level=OFF|TIMESTAMPS|TENSORS.", repeated=True),
        Option("trace-rate", "Deprecated: --trace-config rate=N.", integer(0)),
        Option("trace-count", "Deprecated: --trace-config count=N.", INTEGER),
        Option("trace-log-frequency", "Deprecated: --trace-config triton,log-frequency=N.", integer(0)),
    ),
)


def trace_config(values: Values) -> TraceConfig:
    """What is traced. Raises `ServerError`."""
    from neso.server.tracing import TraceConfig

    return TraceConfig.parse(
        values["trace-config"] or (),
        file=values["trace-file"],
        level=values["trace-level"] or (),
        rate=values["trace-rate"],
        count=values["trace-count"],
        log_frequency=values["trace-log-frequency"],
    )
