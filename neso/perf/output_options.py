"""Options of metrics, telemetry and reports, with their flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from neso.flags import SWITCH, Flag, choice, number


@dataclass(frozen=True)
class OutputOptions:
    """Metrics, telemetry, reports and files of a run."""

    artifact_dir: Annotated[
        Path,
        Flag(
            "artifact-dir",
            "Folder of the results; each run has its own folder inside.",
            aliases=("output-artifact-dir",),
        ),
    ] = Path("artifacts")
    profile_export: Annotated[
        str,
        Flag(
            "profile-export-file",
            "Name of the exports, without extension: NAME_genai_perf.json, NAME_genai_perf.csv, NAME.jsonl.",
            metavar="NAME",
            aliases=("profile-export-prefix",),
        ),
    ] = "profile_export"
    goodput: Annotated[
        tuple[str, ...],
        Flag(
            "goodput",
            "METRIC:VALUE pairs that a request must meet to count as good, for example "
            "time_to_first_token:200 inter_token_latency:20 (milliseconds).",
        ),
    ] = ()
    ui: Annotated[
        str,
        Flag(
            "ui",
            "Display while the load runs.",
            choice("auto", "live", "simple", "none"),
            aliases=("ui-type",),
        ),
    ] = "auto"
    report: Annotated[
        bool, Flag("no-report", "Write no HTML report.", SWITCH, convert=lambda given: not given)
    ] = True
    generate_plots: Annotated[
        bool, Flag("generate-plots", "Also write each chart as an SVG file, in the folder plots.", SWITCH)
    ] = False
    export_raw: Annotated[
        bool,
        Flag(
            "export-raw",
            "Also write the timestamps and texts of all requests, like perf_analyzer's profile_export.json.",
            SWITCH,
        ),
    ] = False
    check_token_counts: Annotated[
        bool,
        Flag(
            "check-token-counts",
            "Tokenize the outputs again and compare with the counts that the server reports.",
            SWITCH,
        ),
    ] = False
    slice_duration: Annotated[
        float,
        Flag(
            "slice-duration",
            "Length of each slice of the timeline, in seconds.",
            number(0.01),
            default_text="run / 60",
        ),
    ] = 0.0
    server_metrics: Annotated[
        tuple[str, ...],
        Flag(
            "server-metrics",
            "URL of the server's metrics in Prometheus format, which are read during the run.",
            aliases=("server-metrics-url", "server-metrics-urls", "metrics-url"),
            default_text="/metrics of the server, and port 8002 if its port is 8000 or 8001",
        ),
    ] = ()
    read_server_metrics: Annotated[
        bool,
        Flag(
            "no-server-metrics", "Do not read the server's metrics.", SWITCH, convert=lambda given: not given
        ),
    ] = True
    telemetry: Annotated[
        bool,
        Flag(
            "no-telemetry",
            "Do not measure CPU, memory and GPU use.",
            SWITCH,
            aliases=("no-gpu-telemetry",),
            convert=lambda given: not given,
        ),
    ] = True
    telemetry_interval: Annotated[
        float,
        Flag(
            "telemetry-interval",
            "Seconds between two readings of server metrics and resource use.",
            number(0.05),
        ),
    ] = 1.0
    verbose: Annotated[bool, Flag("verbose", "Show all statistics on the console.", SWITCH)] = False

    @property
    def keep_text(self) -> bool:
        """Whether the client must keep the texts of responses."""
        return self.check_token_counts or self.export_raw
