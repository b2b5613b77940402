"""Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neso.cli.options.http import http_address
from neso.cli.options.kinds import BOOLEAN, PORT, number
from neso.cli.options.option import Option, Topic
from neso.cli.options.values import Values

if TYPE_CHECKING:
    from neso.frontends.metrics import MetricsOptions
    from neso.server.metrics.config import MetricsConfig

METRICS = Topic(
    "Metrics",
    (
        Option("allow-metrics", "Serve metrics.", BOOLEAN, True),
        Option("metrics-address", "Where the metrics listen.", metavar="HOST", default_text="that of HTTP"),
        Option("metrics-port", "Prometheus metrics.", PORT, 8002),
        Option("allow-gpu-metrics", "Measure GPUs, where there are any.", BOOLEAN, True),
        Option("allow-cpu-metrics", "Measure the CPU and its memory.", BOOLEAN, True),
        Option(
            "metrics-interval-ms",
            "Read CPU and GPUs again for a scrape after so many milliseconds.",
            number(0),
            2000,
        ),
        Option(
            "metrics-config",
            "summary_latencies, histogram_latencies, counter_latencies (true or false), or summary_quantiles.",
            repeated=True,
            metavar="KEY=VALUE",
        ),
    ),
)


def metrics_options(values: Values) -> MetricsOptions | None:
    """None if metrics are off."""
    from neso.frontends.metrics import MetricsOptions

    if not values["allow-metrics"]:
        return None
    return MetricsOptions(values["metrics-address"] or http_address(values), values["metrics-port"])


def measured(values: Values) -> MetricsConfig:
    """What the core measures. Raises `ServerError`."""
    from neso.server.metrics.config import MetricsConfig

    return MetricsConfig.parse(
        values["metrics-config"] or (),
        cpu=values["allow-cpu-metrics"],
        gpu=values["allow-gpu-metrics"],
        interval_ms=values["metrics-interval-ms"],
    )
