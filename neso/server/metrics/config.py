"""Metrics options: `--metrics-config` and others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from neso.flags import Flag, number
from neso.server.errors import InvalidArgument

_ERROR = re.compile(r"\d*\.?\d+")
_FLAGS = ("counter_latencies", "histogram_latencies", "summary_latencies")


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of the summaries. `text` is its label, as written by the user."""

    value: float
    text: str

    @classmethod
    def parse(cls, pair: str) -> Quantile:
        """Parse `QUANTILE:ERROR`. The error has no effect: quantiles are exact. Raises `InvalidArgument`."""
        text, colon, error = (part.strip() for part in pair.partition(":"))
        if not colon or not _ERROR.match(error):
            raise InvalidArgument(f"summary quantile '{pair}': expected <quantile>:<error>")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= 1.0:
            raise InvalidArgument(f"summary quantile '{pair}': expected a quantile from 0 to 1")
        return cls(value, text)


DEFAULT_QUANTILES = tuple(Quantile(float(text), text) for text in ("0.5", "0.9", "0.95", "0.99", "0.999"))


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Selection of metrics. Raises `InvalidArgument`.

    - counter_latencies: cumulative durations, and the counters of the response cache
    - histogram_latencies: time to the first response of decoupled models
    - summary_latencies: durations as `summary_quantiles` over the last minute
    - cpu, gpu: machine metrics; a scrape reads values older than `interval` seconds again
    """

    counter_latencies: bool = True
    histogram_latencies: bool = False
    summary_latencies: bool = False
    summary_quantiles: tuple[Quantile, ...] = DEFAULT_QUANTILES
    cpu: bool = True
    gpu: bool = True
    interval: float = 2.0

    def __post_init__(self) -> None:
        if not self.interval >= 0:
            raise InvalidArgument(f"the metrics interval must not be negative: {self.interval}")

    @classmethod
    def parse(
        cls,
        settings: Annotated[
            Sequence[str],
            Flag(
                "metrics-config",
                "summary_latencies, histogram_latencies, counter_latencies (true or false), or summary_quantiles.",
                metavar="KEY=VALUE",
                repeated=True,
            ),
        ],
        *,
        cpu: Annotated[bool, Flag("allow-cpu-metrics", "Collect CPU and memory metrics.")] = True,
        gpu: Annotated[bool, Flag("allow-gpu-metrics", "Collect GPU metrics.")] = True,
        interval_ms: Annotated[
            float,
            Flag("metrics-interval-ms", "Maximum age of CPU and GPU metrics in milliseconds.", number(0)),
        ] = 2000,
    ) -> MetricsConfig:
        """Parse `NAME=VALUE` settings of `--metrics-config`. Raises `InvalidArgument`."""
        flags: dict[str, bool] = {}
        quantiles = DEFAULT_QUANTILES
        for setting in settings:
            name, equals, value = (part.strip() for part in setting.partition("="))
            if not equals:
                raise InvalidArgument(f"--metrics-config '{setting}': expected <setting>=<value>")
            if name == "summary_quantiles":
                quantiles = tuple(Quantile.parse(pair) for pair in value.split(","))
            elif name not in _FLAGS:
                expected = ", ".join((*_FLAGS, "summary_quantiles"))
                raise InvalidArgument(f"--metrics-config '{setting}': unknown setting, there are {expected}")
            elif value.lower() in ("true", "false"):
                flags[name] = value.lower() == "true"
            else:
                raise InvalidArgument(f"--metrics-config '{setting}': expected true or false")
        return cls(**flags, summary_quantiles=quantiles, cpu=cpu, gpu=gpu, interval=interval_ms / 1000)
