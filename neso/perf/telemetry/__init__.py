"""Telemetry: server metrics, and CPU, memory and GPU use of the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neso.perf.output_options import OutputOptions
    from neso.perf.telemetry.collector import Collector


def start(options: OutputOptions, url: str) -> Collector:
    """Start to measure the server at `url`. Returns an object whose `stop` gives `RunResult.telemetry`."""
    from neso.perf.telemetry.collector import Collector

    return Collector(options, url)
