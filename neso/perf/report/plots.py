"""Plots of runs. Each function takes measurements and returns a chart, to be shown in a notebook or saved as SVG.

A plot that has nothing to show for the runs, such as time to first token without streaming, is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from neso.perf.measurement import Measurement
from neso.perf.metrics import metric_named
from neso.perf.report.charts import Chart, Drawable, HeatMap, Limit, Series, short
from neso.perf.statistics import Array

_BINS = 40
_TIMELINE = 120
_GRID = 12
"""Maximum number of rows and columns of a heat map."""


def values_of(run: Measurement, name: str) -> Array:
    """Return the values of a metric without missing ones. Raises `PerfError` for an unknown metric."""
    metric = metric_named(name)
    if metric.pooled is not None:
        values = metric.pooled(run)
    elif metric.per_request is not None:
        values = run.values.get(metric.name)
    else:
        found = metric.of_run(run) if metric.of_run else None
        values = None if found is None else np.array([found])
    return np.zeros(0) if values is None else values[~np.isnan(values)]


def run_name(run: Measurement) -> str:
    """Return a short name of a run in legends: its load."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in run.result.load.items()) or "run"


def distribution(runs: Sequence[Measurement], metric: str, names: Sequence[str] = ()) -> Chart | None:
    """Histogram of a metric of one run, or cumulative distributions of several."""
    about = metric_named(metric)
    samples = [(i, values) for i, run in enumerate(runs) if len(values := values_of(run, metric))]
    if not samples:
        return None
    label = f"{about.title} ({about.unit})"
    if len(runs) > 1:
        series = []
        for i, values in samples:
            ordered = np.sort(values)[_even(len(values))]
            shares = 100 * np.linspace(0, 1, len(ordered))
            series.append(Series(names[i] if names else run_name(runs[i]), ordered.tolist(), shares.tolist()))
        return Chart(
            about.title, label, "% of values at most", tuple(series), log_x=_spread(samples[0][1]) > 50
        )
    values = samples[0][1]
    wide = _spread(values) > 50 and bool((values > 0).all())
    edges = _edges(values, wide)
    counts, edges = np.histogram(values, edges)
    shares = 100 * counts / len(values)
    labels = [
        f"{short(a)} to {short(b)} {about.unit}: {count} ({share:.1f} %)"
        for a, b, count, share in zip(edges, edges[1:], counts, shares, strict=False)
    ]
    bars = Series("", edges[:-1].tolist(), shares.tolist(), "bars", x2=edges[1:].tolist(), labels=labels)
    p50, p99 = np.percentile(values, [50, 99])
    limits = (
        Limit(float(p50), f"p50 {short(p50)}", vertical=True),
        Limit(float(p99), f"p99 {short(p99)}", vertical=True),
    )
    return Chart(about.title, label, "% of values", (bars,), log_x=wide, limits=limits)


def timeline(run: Measurement) -> Chart | None:
    """Waiting and generation time of the first requests, in the order of their start."""
    if not len(run):
        return None
    start = run.column("start_ns")
    order = np.argsort(start, kind="stable")[:_TIMELINE]
    zero = run.result.start_ns
    begin, first, end = ((one[order] - zero) * 1e-9 for one in (start, run.arrival(0), run.end_ns))
    first = np.where(np.isnan(first), end, first)
    rows = np.arange(1, len(order) + 1, dtype=np.float64)
    tokens = run.output_tokens[order]
    labels = [
        f"request {int(i)}: first token after {short((f - b) * 1e3)} ms, "
        f"end after {short((e - b) * 1e3)} ms, {t:.0f} tokens"
        for i, b, f, e, t in zip(run.records.columns["number"][order], begin, first, end, tokens, strict=True)
    ]
    waiting = Series(
        "until the first token",
        begin.tolist(),
        rows.tolist(),
        "spans",
        first.tolist(),
        labels=labels,
        color=2,
    )
    writing = Series(
        "generation", first.tolist(), rows.tolist(), "spans", end.tolist(), labels=labels, color=1
    )
    series = (
        (waiting, writing)
        if run.streaming
        else (Series("", begin.tolist(), rows.tolist(), "spans", end.tolist(), labels=labels),)
    )
    note = "" if len(order) == len(run) else f"The first {len(order)} of {len(run)} requests."
    return Chart("Timeline", "seconds", "request", series, note=note)


def over_time(run: Measurement, slice_seconds: float = 0.0) -> Chart | None:
    """Output tokens and requests per second, by the time of their arrival."""
    slices = timeslices(run, slice_seconds)
    if slices is None:
        return None
    middle = slices["seconds"].tolist()
    title, label = (
        ("Output tokens over time", "tokens/s") if run.streaming else ("Responses over time", "responses/s")
    )
    values = slices["tokens_per_second"] if run.streaming else slices["requests_per_second"]
    return Chart(title, "seconds", label, (Series("", middle, values.tolist()),))


def timeslices(run: Measurement, slice_seconds: float = 0.0) -> dict[str, Array] | None:
    """Return arrays by slice of time: `seconds` (middle), `requests_per_second` and `tokens_per_second`.

    By default the run has up to 60 slices. The last one may be shorter; its rates are of its own length.
    """
    total = run.seconds
    if not len(run):
        return None
    width = min(slice_seconds or max(total / 60, min(1.0, total / 10)), total)
    edges = np.append(np.arange(0, total, width), total)
    edges = np.unique(edges)
    if len(edges) < 2:
        return None
    lengths = np.diff(edges)
    zero = run.result.start_ns
    arrivals = (run.records.arrivals_ns - zero) * 1e-9
    # Tokens of a request are spread evenly over its events, unless the server reports those of each.
    if run.reported_events:
        weights = run.records.event_tokens.astype(np.float64)
    else:
        per_event = np.nan_to_num(run.output_tokens / np.maximum(run.num_events, 1), nan=1.0)
        weights = np.repeat(per_event, run.num_events.astype(np.int64))
    tokens, _ = np.histogram(arrivals, edges, weights=weights)
    ends, _ = np.histogram((run.end_ns - zero) * 1e-9, edges)
    return {
        "seconds": (edges[:-1] + edges[1:]) / 2,
        "requests_per_second": ends / lengths,
        "tokens_per_second": tokens / lengths,
    }


def latency_over_time(run: Measurement) -> Chart | None:
    """Time to first token (without streaming: latency) of each request by its start."""
    name = "time_to_first_token" if run.streaming else "request_latency"
    values = run.values.get(name)
    if values is None or not len(values):
        return None
    seconds = (run.column("start_ns") - run.result.start_ns) * 1e-9
    kept = np.flatnonzero(~np.isnan(values))
    order = kept[np.argsort(seconds[kept], kind="stable")]
    about = metric_named(name)
    points = Series("", seconds[order].tolist(), values[order].tolist(), "points")
    limits = tuple(Limit(slo.limit, "objective") for slo in run.slos if slo.metric == name)
    return Chart(f"{about.title} over time", "seconds", about.unit, (points,), limits=limits)


def by_position(run: Measurement) -> Chart | None:
    """Time between chunks by the position of the chunk in the response: median, and the middle 90 %."""
    if not run.streaming or not len(run.gaps):
        return None
    gaps_per_request = np.maximum(run.num_events - 1, 0).astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(gaps_per_request)[:-1]])
    position = np.arange(len(run.gaps)) - np.repeat(starts, gaps_per_request) + 2
    order = np.argsort(position, kind="stable")
    sorted_gaps, sorted_position = run.gaps[order], position[order]
    places, first = np.unique(sorted_position, return_index=True)
    groups = np.split(sorted_gaps, first[1:])
    shown = _even(len(groups), 400)
    quantiles = np.array([np.percentile(groups[i], [5, 50, 95]) for i in shown])
    x = places[shown].astype(np.float64).tolist()
    middle = Series("5 % to 95 %", x, quantiles[:, 0].tolist(), "range", y2=quantiles[:, 2].tolist(), color=1)
    median = Series("median", x, quantiles[:, 1].tolist(), color=1)
    return Chart("Inter chunk latency by position", "chunk of the response", "ms", (middle, median))


def length_heat_map(run: Measurement) -> HeatMap | None:
    """Number of requests by prompt and output length."""
    known = ~np.isnan(run.input_tokens) & ~np.isnan(run.output_tokens)
    isl, osl = run.input_tokens[known], run.output_tokens[known]
    if not len(isl):
        return None
    columns, rows = _length_edges(isl), _length_edges(osl)
    counts, _, _ = np.histogram2d(osl, isl, (rows, columns))
    return HeatMap(
        "Prompt and output lengths",
        "prompt tokens",
        "output tokens",
        _ranges(columns),
        _ranges(rows),
        tuple(tuple(map(float, row)) for row in counts),
        "requests",
    )


def first_token_by_length(run: Measurement) -> Chart | None:
    """Time to first token of each request by its prompt length."""
    values = run.values.get("time_to_first_token")
    if values is None:
        return None
    known = ~np.isnan(values) & ~np.isnan(run.input_tokens)
    if not known.any() or len(np.unique(run.input_tokens[known])) < 2:
        return None
    points = Series("", run.input_tokens[known].tolist(), values[known].tolist(), "points")
    return Chart("Time To First Token by prompt length", "prompt tokens", "ms", (points,))


def goodput_frontier(run: Measurement) -> HeatMap | None:
    """Requests per second within limits of time to first token and inter token latency, for many limits."""
    ttft, itl = run.values.get("time_to_first_token"), run.values.get("inter_token_latency")
    if ttft is None or itl is None or np.isnan(itl).all():
        return None
    shares = np.linspace(0, 100, _GRID)
    columns = np.unique(np.nanpercentile(ttft, shares))
    rows = np.unique(np.nanpercentile(itl, shares))
    within_itl = itl[None, :] <= rows[:, None]
    within_ttft = ttft[None, :] <= columns[:, None]
    rates = (within_itl[:, None, :] & within_ttft[None, :, :]).sum(axis=2) / run.seconds
    return HeatMap(
        "Goodput by limits",
        "limit of time to first token (ms)",
        "limit of inter token latency (ms)",
        tuple(short(v) for v in columns),
        tuple(short(v) for v in rows),
        tuple(tuple(map(float, row.round(4))) for row in rates),
        "requests/s",
    )


def load_value(run: Measurement) -> float | None:
    """Return the number that a sweep varies: concurrency, rate, or the first number of the load."""
    numbers = [v for v in run.result.load.values() if isinstance(v, int | float) and not isinstance(v, bool)]
    return float(numbers[0]) if numbers else None


def latency_against_throughput(
    runs: Sequence[Measurement],
    latency: str = "time_to_first_token",
    throughput: str = "output_token_throughput",
) -> Chart | None:
    """A latency (p50 and p99) against the throughput of each run of a sweep."""
    points = [run for run in runs if latency in run.summaries and throughput in run.summaries]
    if len(points) < 2:
        return None
    about, amount = metric_named(latency), metric_named(throughput)
    points.sort(key=lambda run: load_value(run) or 0.0)
    x = [run.summaries[throughput].avg for run in points]
    series = []
    for statistic in ("p50", "p99"):
        y = [run.summaries[latency].get(statistic) for run in points]
        labels = [
            f"{run_name(run)}: {statistic} {short(v)} ms at {short(t)} {amount.unit}"
            for run, v, t in zip(points, y, x, strict=True)
        ]
        series.append(Series(statistic, x, y, labels=labels, marks=True))
    return Chart(
        f"{about.title} against throughput", f"{amount.title} ({amount.unit})", about.unit, tuple(series)
    )


def user_against_total(runs: Sequence[Measurement]) -> Chart | None:
    """Tokens per second of one user against tokens per second of all, of each run of a sweep."""
    name = "output_token_throughput_per_user"
    points = [run for run in runs if name in run.summaries and "output_token_throughput" in run.summaries]
    if len(points) < 2:
        return None
    points.sort(key=lambda run: load_value(run) or 0.0)
    x = [run.summaries[name].avg for run in points]
    y = [run.summaries["output_token_throughput"].avg for run in points]
    labels = [
        f"{run_name(run)}: {short(a)} per user, {short(b)} in total"
        for run, a, b in zip(points, x, y, strict=True)
    ]
    return Chart(
        "Throughput: total against per user",
        "tokens/s of one user",
        "tokens/s in total",
        (Series("", x, y, labels=labels, marks=True),),
    )


def throughput_by_load(runs: Sequence[Measurement]) -> Chart | None:
    """Requests per second, and goodput if there are objectives, by the load of each run of a sweep."""
    points = [(value, run) for run in runs if (value := load_value(run)) is not None]
    if len(points) < 2:
        return None
    points.sort(key=lambda point: point[0])
    loads = [value for value, _ in points]
    series = []
    for title, name in (("all requests", "request_throughput"), ("goodput", "goodput")):
        if all(name in run.summaries for _, run in points):
            series.append(Series(title, loads, [run.summaries[name].avg for _, run in points], marks=True))
    if not series:
        return None
    label = next(iter(points[0][1].result.load), "load").replace("_", " ")
    title = "Goodput by load" if len(series) > 1 else "Request throughput by load"
    return Chart(title, label, "requests/s", tuple(series))


def telemetry_charts(run: Measurement) -> list[Chart]:
    """Server metrics, and CPU, memory and GPU use over time: one chart for each group of series."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for series in run.result.telemetry.get("series", ()):
        groups.setdefault((series["group"], series["unit"]), []).append(series)
    charts = []
    for (group, unit), members in groups.items():
        lines = tuple(
            Series(
                one["name"] if len(members) > 1 else "",
                [(ns - run.result.start_ns) * 1e-9 for ns in one["ns"]],
                one["values"],
            )
            for one in members[:6]
        )
        charts.append(
            Chart(
                group,
                "seconds",
                unit,
                lines,
                note="" if len(members) <= 6 else f"The first 6 of {len(members)} series.",
            )
        )
    return charts


def run_charts(run: Measurement, slice_seconds: float = 0.0) -> list[Drawable]:
    """Return all charts of one run."""
    charts = [
        distribution([run], "time_to_first_token"),
        distribution([run], "inter_token_latency"),
        distribution([run], "request_latency"),
        distribution([run], "inter_chunk_latency"),
        timeline(run),
        over_time(run, slice_seconds),
        latency_over_time(run),
        by_position(run),
        length_heat_map(run),
        first_token_by_length(run),
        goodput_frontier(run),
        *telemetry_charts(run),
    ]
    return [chart for chart in charts if chart is not None]


def sweep_charts(runs: Sequence[Measurement]) -> list[Drawable]:
    """Return the charts that compare the runs of a sweep."""
    streamed = any(run.streaming for run in runs)
    amount = (
        "output_token_throughput"
        if any("output_token_throughput" in run.summaries for run in runs)
        else "request_throughput"
    )
    charts: list[Drawable | None] = [
        throughput_by_load(runs),
        latency_against_throughput(runs, "request_latency", amount),
    ]
    if streamed:
        charts += [
            latency_against_throughput(runs, "time_to_first_token", amount),
            latency_against_throughput(runs, "inter_token_latency", amount),
            user_against_total(runs),
            distribution(runs, "time_to_first_token"),
            distribution(runs, "inter_token_latency"),
        ]
    charts.append(distribution(runs, "request_latency"))
    return [chart for chart in charts if chart is not None]


def _even(number: int, most: int = 1500) -> np.ndarray:
    """Return up to `most` evenly spaced indexes below `number`."""
    return np.unique(np.linspace(0, number - 1, min(number, most)).round().astype(np.int64))


def _spread(values: Array) -> float:
    low, high = np.percentile(values, [1, 99])
    return float(high / low) if low > 0 else 0.0


def _edges(values: Array, log: bool) -> Array:
    low, high = float(values.min()), float(values.max())
    bins = min(_BINS, max(5, int(np.sqrt(len(values)) * 2)))
    if low == high:
        return np.array([low * 0.95 - 0.5, high * 1.05 + 0.5])
    return np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)


def _length_edges(lengths: Array) -> Array:
    """Return edges of integer cells over lengths, at most `_GRID`."""
    low, high = int(lengths.min()), int(lengths.max())
    step = max(1, -(-(high - low + 1) // _GRID))
    return np.arange(low, high + step + 1, step, dtype=np.float64)


def _ranges(edges: Array) -> tuple[str, ...]:
    step = int(edges[1] - edges[0])
    return tuple(
        str(int(edge)) if step == 1 else f"{int(edge)}–{int(edge) + step - 1}" for edge in edges[:-1]
    )
