"""Comparison of runs, with bootstrap confidence intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from neso.perf.console import WIDTH, load_text, number, table
from neso.perf.errors import PerfError
from neso.perf.exports.run_folder import load_runs
from neso.perf.measurement import Measurement
from neso.perf.metrics import Slo, metric_named
from neso.perf.report.charts import Drawable
from neso.perf.report.html import figures, html_table, page
from neso.perf.report.plots import distribution, timeslices, values_of
from neso.perf.statistics import Array, Interval, bootstrap_ratio, mean, quantile

COMPARED = (
    ("request_throughput", "avg"),
    ("output_token_throughput", "avg"),
    ("goodput", "avg"),
    ("time_to_first_token", "p50"),
    ("time_to_first_token", "p99"),
    ("inter_token_latency", "p50"),
    ("inter_token_latency", "p99"),
    ("inter_chunk_latency", "p99"),
    ("request_latency", "p50"),
    ("request_latency", "p99"),
    ("output_sequence_length", "avg"),
    ("input_sequence_length", "avg"),
)
_MIN_SAMPLES = 8
"""Minimum number of values for a confidence interval."""


@dataclass(frozen=True)
class Difference:
    """One statistic of two runs: `ratio` is other / base; its interval is None for too few values."""

    metric: str
    statistic: str
    unit: str
    base: float
    other: float
    ratio: Interval | None
    larger_is_better: bool

    @property
    def verdict(self) -> str:
        """better, worse, or "" where the interval contains 1 or the metric has no direction."""
        if self.ratio is None or not self.ratio.excludes(1.0) or self.metric.endswith("sequence_length"):
            return ""
        return "better" if (self.ratio.value > 1) == self.larger_is_better else "worse"


@dataclass(frozen=True)
class Comparison:
    """Differences of one run from the base."""

    base: str
    other: str
    differences: tuple[Difference, ...]


def compare(base: Measurement, other: Measurement, *, confidence: float = 0.95) -> tuple[Difference, ...]:
    """Return the differences of two runs in all statistics of `COMPARED` that both have.

    Latencies are resampled by request. Throughputs and goodput are resampled by slices of time, because requests of one
    run are not independent of each other.
    """
    found = []
    for name, statistic in COMPARED:
        metric = metric_named(name)
        if name not in base.summaries or name not in other.summaries:
            continue
        ratio = ratio_of([base], [other], name, statistic, confidence=confidence)
        values = [run.summaries[name].get(statistic) for run in (base, other)]
        found.append(
            Difference(name, statistic, metric.unit, values[0], values[1], ratio, metric.larger_is_better)
        )
    return tuple(found)


def ratio_of(
    base: Sequence[Measurement],
    other: Sequence[Measurement],
    name: str,
    statistic: str,
    *,
    confidence: float = 0.95,
) -> Interval | None:
    """Return the ratio other / base of a statistic, over all runs of each side; None for too few values."""
    samples = [np.concatenate([_samples(run, name) for run in runs]) for runs in (base, other)]
    if min(map(len, samples)) < _MIN_SAMPLES:
        return None
    reduce = mean if statistic == "avg" else quantile(int(statistic[1:]) / 100)
    return bootstrap_ratio(samples[0], samples[1], reduce, confidence=confidence)


def _samples(run: Measurement, name: str) -> Array:
    """Return the values that are drawn again: of requests, or of slices of time for metrics of the whole run."""
    if metric_named(name).of_run is None:
        return values_of(run, name)
    slices = timeslices(run, run.seconds / 20)
    if slices is None:
        return np.zeros(0)
    if name == "goodput":
        ends = (run.end_ns[run.good] - run.result.start_ns) * 1e-9
        counts, edges = np.histogram(ends, bins=len(slices["seconds"]), range=(0, run.seconds))
        return counts / np.diff(edges)
    return slices["tokens_per_second" if name.startswith("output") else "requests_per_second"]


def compare_folders(
    folders: Sequence[str | Path], *, slos: Sequence[Slo] = (), confidence: float = 0.95
) -> tuple[list[Comparison], list[list[Measurement]]]:
    """Compare the runs in folders with those of the first folder, load by load. Raises `PerfError`.

    Two folders of single runs are compared whatever their loads are. Also returns the runs of each comparison.
    """
    if len(folders) < 2:
        raise PerfError("give at least two folders of runs to compare")
    if not 0.5 <= confidence < 1:
        raise PerfError(f"--confidence must be from 0.5 to below 1, got {confidence}")
    names = _names(folders)
    groups = [[Measurement(run, slos=slos) for run in load_runs(folder)] for folder in folders]
    comparisons, compared = [], []
    for base in groups[0]:
        together = [base]
        for name, group in zip(names[1:], groups[1:], strict=True):
            single = len(groups[0]) == len(group) == 1
            match = next((run for run in group if single or run.result.load == base.result.load), None)
            if match is None:
                continue
            load = load_text(base.result.load)
            other = load_text(match.result.load)
            comparisons.append(
                Comparison(
                    f"{names[0]} ({load})", f"{name} ({other})", compare(base, match, confidence=confidence)
                )
            )
            together.append(match)
        compared.append(together)
    if not comparisons:
        raise PerfError(f"the runs in {folders[0]} and the other folders have no load in common")
    return comparisons, compared


def _names(folders: Sequence[str | Path]) -> list[str]:
    """Return the last parts of paths that tell them apart."""
    parts = [Path(folder).resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-depth:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(one)} #{i}" for i, one in enumerate(parts, 1)]


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the table of a comparison, in 80 columns."""
    statistics = table()
    statistics.add_column("Statistic", overflow="fold")
    for name in ("base", "other", "ratio", "interval", ""):
        statistics.add_column(name, justify="right", no_wrap=True)
    for one in comparison.differences:
        statistics.add_row(*_cells(one))
    console = console or Console(width=WIDTH)
    console.print(f"base:  {comparison.base}\nother: {comparison.other}", markup=False, highlight=False)
    console.print(statistics)


def _cells(one: Difference) -> list[str]:
    ratio = one.other / one.base if one.base else float("nan")
    interval = "too few" if one.ratio is None else f"{one.ratio.low:.3f} to {one.ratio.high:.3f}"
    title = metric_named(one.metric).title
    return [
        f"{title} {one.statistic} ({one.unit})",
        number(one.base),
        number(one.other),
        f"{ratio:.3f}",
        interval,
        one.verdict,
    ]


def write_comparison(
    comparisons: Sequence[Comparison], compared: Sequence[Sequence[Measurement]], path: Path
) -> None:
    """Write comparisons to an HTML or, by its extension, a JSON file."""
    if path.suffix == ".json":
        path.write_text(json.dumps([asdict(one) for one in comparisons], indent=1), encoding="utf-8")
        return
    parts = ["<h1>neso perf: comparison</h1>"]
    for comparison in comparisons:
        parts.append(f"<h2>{comparison.other} / {comparison.base}</h2>")
        header = ("", "base", "other", "ratio", "confidence interval", "")
        parts.append(html_table(header, [_cells(one) for one in comparison.differences]))
    for runs in compared:
        names = [f"{position}: {load_text(run.result.load)}" for position, run in enumerate(runs, 1)]
        parts += [f"<h2>Distributions, {load_text(runs[0].result.load)}</h2>", figures(_charts(runs, names))]
    path.write_text(page("neso perf: comparison", "".join(parts)), encoding="utf-8")


def _charts(runs: Sequence[Measurement], names: Sequence[str]) -> list[Drawable]:
    metrics: tuple[str, ...] = ("time_to_first_token", "inter_token_latency", "request_latency")
    charts = [distribution(runs, metric, names) for metric in metrics]
    return [chart for chart in charts if chart is not None]
