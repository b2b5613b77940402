"""Tables and the live display on the console."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from neso.perf.measurement import Measurement
from neso.perf.metrics import METRICS, Metric
from neso.perf.records import MS, Records
from neso.perf.statistics import Summary

STATISTICS = ("avg", "min", "max", "p99", "p90", "p75", "p50")
WIDTH = 80
_SIMPLE_SECONDS = 5.0
_EARLY_ENDS = {
    "interrupted": "was interrupted",
    "server": "ended: the server stopped answering",
    "errors": "ended: every request failed",
    "worker": "ended: a worker process died",
}
"""Messages for the stop reasons of incomplete runs."""


def number(value: float) -> str:
    """Format a number in at most seven characters, for values below ten million."""
    if not np.isfinite(value):
        return "-"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}" if size < 1e6 else f"{value / 1e6:,.2f}M"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}"


def load_text(load: dict[str, Any]) -> str:
    """Describe a load in words: `concurrency 4, request rate 2.5`."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in load.items()) or "one run"


Column = tuple[str, str, str]
"""Title, metric and statistic of a column."""
COLUMNS: tuple[Column, ...] = (
    ("req/s", "request_throughput", "avg"),
    ("tok/s", "output_token_throughput", "avg"),
    ("TTFT p50", "time_to_first_token", "p50"),
    ("TTFT p99", "time_to_first_token", "p99"),
    ("ITL p50", "inter_token_latency", "p50"),
    ("E2E p99", "request_latency", "p99"),
    ("good/s", "goodput", "avg"),
    ("failed", "error_request_count", "avg"),
)
"""Columns of a sweep."""


def table(title: str = "") -> Table:
    """Return an empty table of 80 columns."""
    return Table(title=title or None, box=box.SIMPLE_HEAD, width=WIDTH, padding=(0, 1, 0, 0))


def present_columns(columns: Sequence[Column], runs: Sequence[Measurement]) -> list[Column]:
    """Return the columns whose metric some run has."""
    return [column for column in columns if any(column[1] in run.summaries for run in runs)]


def cells(run: Measurement | None, columns: Sequence[Column]) -> list[str]:
    """Return the values of a run, "-" for those it lacks; None is a run that failed."""
    found = []
    for title, name, statistic in columns:
        summary = None if run is None else run.summaries.get(name)
        if summary is None:
            found.append("-")
        else:
            found.append(f"{summary.avg:.0f}" if title == "failed" else number(summary.get(statistic)))
    return found


def metrics_table(measurement: Measurement, *, verbose: bool = False) -> Table:
    """Return the table of genai-perf, which fits 80 columns; `verbose` adds all other metrics."""
    found = table("Neso Perf | LLM Metrics")
    found.add_column("Statistic", overflow="fold")
    for name in STATISTICS:
        found.add_column(name, justify="right", no_wrap=True)
    for metric in METRICS:
        summary = measurement.summaries.get(metric.name)
        if summary is not None and (metric.console or verbose):
            found.add_row(f"{metric.title} ({metric.unit})", *statistic_cells(metric, summary))
    return found


def statistic_cells(metric: Metric, summary: Summary) -> list[str]:
    """Return the values of `STATISTICS`; a metric of the whole run has only the first."""
    if metric.of_run:
        return [number(summary.avg), *[""] * (len(STATISTICS) - 1)]
    return [number(summary.get(name)) for name in STATISTICS]


def print_run(measurement: Measurement, *, verbose: bool = False, console: Console | None = None) -> None:
    """Print the table of one run, its errors and its warnings."""
    console = console or _console()
    run = measurement.result
    if len(measurement):
        console.print(metrics_table(measurement, verbose=verbose))
    else:
        console.print(f"No request succeeded ({load_text(run.load)}).", style="bold")
    for kind, (count, message) in measurement.errors.items():
        console.print(f"{count} requests failed: {kind}. {message}".rstrip(), style="red", markup=False)
    if run.stop_reason in _EARLY_ENDS:
        ended = _EARLY_ENDS[run.stop_reason]
        console.print(f"The run {ended}; the figures are of what was done until then.", style="yellow")
    for text in (*run.errors, *measurement.warnings):
        console.print(text, style="yellow", markup=False)


def print_sweep(measurements: Sequence[Measurement], console: Console | None = None) -> None:
    """Print one line for each run of a sweep."""
    console = console or _console()
    sweep = table("Sweep")
    single = all(len(one.result.load) == 1 for one in measurements)
    name = next(iter(measurements[0].result.load)).replace("_", " ") if single else "load"
    sweep.add_column(name, overflow="fold", no_wrap=single)
    columns = present_columns(COLUMNS, measurements)
    for title, _, _ in columns:
        sweep.add_column(title, justify="right")
    for one in measurements:
        load = one.result.load
        sweep.add_row(str(next(iter(load.values()))) if single else load_text(load), *cells(one, columns))
    console.print(sweep)


def _console() -> Console:
    return Console(width=WIDTH) if not sys.stdout.isatty() else Console()


class Progress:
    """Display of a running load: a bar on a terminal, else a line every few seconds; nothing if `ui` is none."""

    def __init__(
        self, ui: str, load: dict[str, Any], requests: int | None = None, seconds: float | None = None
    ) -> None:
        """`requests` and `seconds` are the planned number and duration, if known."""
        self._console = Console(stderr=True)
        if ui == "auto":
            ui = "live" if self._console.is_terminal else "simple"
        self._ui = ui
        self._name = load_text(load)
        self._requests, self._seconds = requests, seconds
        self._recent = _Recent()
        self._started = self._printed = time.monotonic()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task(self._name, total=requests or seconds, text="")

    def __enter__(self) -> Progress:
        self._started = self._printed = time.monotonic()
        if self._ui == "live":
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ui == "live":
            self._bar.stop()

    def update(self, records: Records) -> None:
        """Show the state of the run; `records` are those since the last call."""
        if self._ui == "none":
            return
        self._recent.add(records)
        now = time.monotonic()
        text = self._recent.text(now - self._started)
        if self._ui == "live":
            done = self._recent.done if self._requests is not None else now - self._started
            self._bar.update(self._task, completed=done, text=text)
        elif now - self._printed >= _SIMPLE_SECONDS:
            self._printed = now
            planned = f" of {self._requests}" if self._requests is not None else ""
            self._console.print(
                f"{self._name}: {self._recent.done}{planned} requests, {text}", highlight=False
            )


class _Recent:
    """Totals of a run, and times to first token of its last requests."""

    def __init__(self) -> None:
        self.done = 0
        self._failed = 0
        self._tokens = 0
        self._ttft: list[float] = []

    def add(self, records: Records) -> None:
        measured = records.select(~records.columns["warm_up"]) if len(records) else records
        if not len(measured):
            return
        ok = measured.ok
        self.done += len(measured)
        self._failed += int((~ok & ~measured.columns["cancelled"]).sum())
        good = measured.select(ok)
        tokens = good.columns["output_tokens"]
        counted = np.where(tokens < 0, np.diff(good.arrival_offsets), tokens)
        self._tokens += int(counted.sum())
        answered = np.diff(good.arrival_offsets) > 0
        first = good.arrivals_ns[good.arrival_offsets[:-1][answered]]
        self._ttft += ((first - good.columns["start_ns"][answered]) * MS).tolist()
        del self._ttft[:-200]

    def text(self, elapsed: float) -> str:
        elapsed = max(elapsed, 1e-3)
        parts = [f"{self.done / elapsed:,.1f} req/s", f"{self._tokens / elapsed:,.0f} tok/s"]
        if self._ttft:
            parts.append(f"TTFT {number(float(np.median(self._ttft)))} ms")
        if self._failed:
            parts.append(f"{self._failed} failed")
        return ", ".join(parts)
