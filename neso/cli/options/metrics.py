"""Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.cli.options.kinds import BOOLEAN, PORT, number
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.frontends.metrics import MetricsOptions

METRICS = Topic(
    "Metrics",
    (
        Option("allow-metrics", "Serve metrics.", BOOLEAN, True),
        Option("metrics-address", "Where the metrics listen.", metavar="HOST", default_text="that of HTTP"),
        Option("metrics-port", "Prometheus metrics.", PORT, 8002),
        Option(
            "allow-gpu-metrics",
            "Serve metrics of GPUs.",
            BOOLEAN,
            absent="turning them on",
            harmless=(False,),
        ),
        Option(
            "allow-cpu-metrics",
            "Serve metrics of the CPU and its memory.",
            BOOLEAN,
            absent="turning them on",
            harmless=(False,),
        ),
        Option(
            "metrics-interval-ms",
            "Milliseconds between two readings of the metrics of devices.",
            number(0),
            2000,
            absent="this interval",
        ),
        Option(
            "metrics-config",
            "Setting of the metrics.",
            repeated=True,
            metavar="KEY=VALUE",
            absent="configuring metrics",
        ),
    ),
)


def metrics_options(values: Values) -> MetricsOptions | None:
    """None if metrics are off."""
    from neso.frontends.metrics import MetricsOptions

    if not values["allow-metrics"]:
        return None
    return MetricsOptions(values["metrics-address"] or values["http-address"], values["metrics-port"])
