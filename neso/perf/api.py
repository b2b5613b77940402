"""The Python API of `neso perf`: runs, raw data, metrics, plots. docs/guides/perf.md shows how to use it."""

from __future__ import annotations

from neso.perf.client.generator import LoadGenerator
from neso.perf.compare import compare, compare_folders
from neso.perf.endpoints.base import HttpEndpoint
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.exports.run_folder import load_run, load_runs
from neso.perf.inputs import open_source
from neso.perf.inputs.options import InputOptions
from neso.perf.load.options import LoadOptions
from neso.perf.load.plan import LoadPlan
from neso.perf.measurement import Measurement
from neso.perf.metrics import Metric, parse_slos, register_metric
from neso.perf.output_options import OutputOptions
from neso.perf.profile import profile
from neso.perf.records import Records, RequestRecord, RunResult
from neso.perf.report import plots
from neso.perf.report.html import write_report
from neso.perf.requests import InputSource, PerfRequest

__all__ = [
    "EndpointOptions",
    "HttpEndpoint",
    "InputOptions",
    "InputSource",
    "LoadGenerator",
    "LoadOptions",
    "LoadPlan",
    "Measurement",
    "Metric",
    "OutputOptions",
    "PerfError",
    "PerfRequest",
    "Records",
    "RequestRecord",
    "RunResult",
    "compare",
    "compare_folders",
    "load_run",
    "load_runs",
    "open_source",
    "parse_slos",
    "plots",
    "profile",
    "register_metric",
    "write_report",
]
