"""Definitions of metrics, and service level objectives. docs/reference/perf.md explains the metrics.

Times are milliseconds unless the unit says otherwise. Only complete responses count; requests of the warm-up never do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from neso.perf.errors import PerfError
from neso.perf.records import MS
from neso.perf.statistics import Array

if TYPE_CHECKING:
    from neso.perf.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric; one of the three functions computes it.

    - per_request: array [num_requests], NaN where a request has no value; None if the run has none
    - pooled: values of all requests together, of any number
    - of_run: one number for the run
    """

    name: str
    title: str
    unit: str
    per_request: Callable[[Measurement], Array | None] | None = None
    pooled: Callable[[Measurement], Array | None] | None = None
    of_run: Callable[[Measurement], float | None] | None = None
    larger_is_better: bool = False
    console: bool = False
    """Shown in the console's table."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A service level objective: a limit of a per-request metric, at most or at least, in its unit."""

    metric: str
    limit: float
    at_least: bool = False


def parse_slos(texts: Sequence[str]) -> tuple[Slo, ...]:
    """Parse objectives of the form NAME:VALUE, separated by spaces. Raises `PerfError`."""
    found: dict[str, Slo] = {}
    named = {metric.name: metric for metric in METRICS if metric.per_request}
    for text in " ".join(texts).split():
        name, _, value = text.rpartition(":")
        name = ALIASES.get(name, name)
        if name not in named:
            raise PerfError(f"--goodput {text}: expected METRIC:VALUE with one of {', '.join(sorted(named))}")
        if name in found:
            raise PerfError(f"--goodput: {name} is given twice")
        try:
            limit = float(value)
        except ValueError:
            limit = np.nan
        if not limit >= 0:
            raise PerfError(f"--goodput {text}: expected a number of at least 0, got '{value}'")
        found[name] = Slo(name, limit, named[name].larger_is_better)
    return tuple(found.values())


ALIASES = {"ttft": "time_to_first_token", "itl": "inter_token_latency", "tpot": "inter_token_latency"}
"""Short names of metrics, accepted in objectives."""


def _since_start(arrival: Callable[[Measurement], Array]) -> Callable[[Measurement], Array]:
    return lambda run: (arrival(run) - run.column("start_ns")) * MS


def _since_intended(arrival: Callable[[Measurement], Array]) -> Callable[[Measurement], Array]:
    return lambda run: (arrival(run) - run.column("intended_ns")) * MS


def _streamed(compute: Callable[[Measurement], Array]) -> Callable[[Measurement], Array | None]:
    return lambda run: compute(run) if run.streaming else None


def _first_output(run: Measurement) -> Array | None:
    """Time to the first event that is not reasoning; None unless some response has reasoning."""
    first, output = run.arrival(0), run.records.columns["first_output_ns"].astype(np.float64)
    if not ((output > 0) & (output > first)).any():
        return None
    return np.where(output > 0, (output - run.column("start_ns")) * MS, np.nan)


def _first_byte(run: Measurement) -> Array:
    first = run.records.columns["first_byte_ns"].astype(np.float64)
    return np.where(first > 0, (first - run.column("start_ns")) * MS, np.nan)


def _second_token(run: Measurement) -> Array:
    return (run.arrival(1) - run.arrival(0)) * MS


def _latency(run: Measurement) -> Array:
    return (run.end_ns - run.column("start_ns")) * MS


def _inter_token(run: Measurement) -> Array:
    """(Latency - TTFT) / (tokens after the first event); NaN for a response with no such token."""
    after = run.output_tokens - run.first_event_tokens
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            (after > 0) & (run.num_events > 1), (run.end_ns - run.arrival(0)) * MS / after, np.nan
        )


def _pooled_inter_token(run: Measurement) -> Array | None:
    """Gap divided by the tokens of its event, once for each token if the server reports them."""
    if not run.streaming:
        return None
    positive = run.gap_tokens > 0
    tokens = run.gap_tokens[positive]
    times = run.gaps[positive] / tokens
    return np.repeat(times, tokens.astype(np.int64)) if run.reported_events else times


def _per_user(run: Measurement) -> Array:
    with np.errstate(divide="ignore"):
        speed = 1e3 / _inter_token(run)
    return np.where(np.isinf(speed), np.nan, speed)


def _prefill(run: Measurement) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = run.input_tokens * 1e3 / ((run.arrival(0) - run.column("start_ns")) * MS)
    return np.where(np.isinf(speed), np.nan, speed)


def _cached(run: Measurement) -> Array | None:
    cached = run.column("cached_tokens")
    return None if np.isnan(cached).all() else 100 * cached / np.maximum(run.input_tokens, 1)


def _reasoning(run: Measurement) -> Array | None:
    reasoning = run.column("reasoning_tokens")
    return reasoning if np.nansum(reasoning) > 0 else None


def _length_difference(run: Measurement) -> Array | None:
    retokenized = run.retokenized_output
    if retokenized is None or run.output_tokens_source != "usage":
        return None
    return retokenized - run.output_tokens


def _output_share(run: Measurement) -> Array | None:
    requested = run.column("requested_output_tokens")
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 100 * run.output_tokens / requested
    return None if np.isnan(requested).all() else np.where(requested > 0, share, np.nan)


def _rate(amount: Callable[[Measurement], Array]) -> Callable[[Measurement], float | None]:
    """Return the sum of an amount per second; None if no request has it."""

    def compute(run: Measurement) -> float | None:
        values = amount(run)
        return None if np.isnan(values).all() else float(np.nansum(values)) / run.seconds

    return compute


def _items(run: Measurement) -> float | None:
    items = run.records.columns["items"]
    return float(items.sum()) / run.seconds if (items > 1).any() else None


def _error_rate(run: Measurement) -> float | None:
    failed = sum(number for kind, (number, _) in run.errors.items() if kind != "cancelled")
    return 100 * failed / len(run.all_records) if len(run.all_records) else None


def _error_count(run: Measurement) -> float | None:
    return float(sum(number for kind, (number, _) in run.errors.items() if kind != "cancelled"))


METRICS: list[Metric] = [
    Metric("time_to_first_token", "Time To First Token", "ms",
           _streamed(_since_start(lambda run: run.arrival(0))), console=True),
    Metric("time_to_second_token", "Time To Second Token", "ms", _streamed(_second_token), console=True),
    Metric("time_to_first_output_token", "Time To First Output Token", "ms", _first_output, console=True),
    Metric("request_latency", "Request Latency", "ms", _latency, console=True),
    Metric("inter_token_latency", "Inter Token Latency", "ms", _streamed(_inter_token), console=True),
    Metric("time_per_output_token", "Time Per Output Token", "ms", _streamed(_inter_token)),
    Metric("pooled_inter_token_latency", "Inter Token Latency, pooled", "ms", pooled=_pooled_inter_token),
    Metric("inter_chunk_latency", "Inter Chunk Latency", "ms",
           pooled=lambda run: run.gaps if run.streaming else None),
    Metric("output_token_throughput_per_user", "Output Token Throughput Per User", "tokens/sec/user",
           _streamed(_per_user), larger_is_better=True, console=True),
    Metric("output_sequence_length", "Output Sequence Length", "tokens",
           lambda run: run.output_tokens, larger_is_better=True, console=True),
    Metric("input_sequence_length", "Input Sequence Length", "tokens",
           lambda run: run.input_tokens, larger_is_better=True, console=True),
    Metric("reasoning_token_count", "Reasoning Tokens", "tokens", _reasoning, larger_is_better=True),
    Metric("cached_prompt_share", "Cached Prompt Tokens", "%", _cached, larger_is_better=True),
    Metric("prefill_throughput_per_user", "Prefill Throughput Per User", "tokens/sec/user",
           _streamed(_prefill), larger_is_better=True),
    Metric("time_to_first_byte", "Time To First Byte", "ms", _first_byte),
    Metric("intended_request_latency", "Request Latency From Intended Start", "ms",
           _since_intended(lambda run: run.end_ns)),
    Metric("intended_time_to_first_token", "Time To First Token From Intended Start", "ms",
           _streamed(_since_intended(lambda run: run.arrival(0)))),
    Metric("client_lag", "Client Lag", "ms", _since_intended(lambda run: run.column("start_ns"))),
    Metric("output_length_difference", "Re-tokenized Minus Reported Output Length", "tokens",
           _length_difference),
    Metric("output_length_share", "Output Length Of Requested", "%", _output_share, larger_is_better=True),
    Metric("output_token_throughput", "Output Token Throughput", "tokens/sec",
           of_run=_rate(lambda run: run.output_tokens), larger_is_better=True, console=True),
    Metric("total_token_throughput", "Total Token Throughput", "tokens/sec",
           of_run=_rate(lambda run: run.output_tokens + run.input_tokens), larger_is_better=True),
    Metric("request_throughput", "Request Throughput", "requests/sec",
           of_run=lambda run: len(run) / run.seconds, larger_is_better=True, console=True),
    Metric("item_throughput", "Text Or Passage Throughput", "items/sec", of_run=_items,
           larger_is_better=True, console=True),
    Metric("goodput", "Goodput", "requests/sec",
           of_run=lambda run: float(run.good.sum()) / run.seconds if run.slos else None,
           larger_is_better=True, console=True),
    Metric("good_request_share", "Good Requests", "%",
           of_run=lambda run: 100 * float(run.good.sum()) / max(1, len(run.all_records)) if run.slos else None,
           larger_is_better=True),
    Metric("request_count", "Request Count", "count",
           of_run=lambda run: float(len(run)), larger_is_better=True, console=True),
    Metric("error_request_count", "Failed Requests", "count", of_run=_error_count),
    Metric("error_request_rate", "Failed Requests", "%", of_run=_error_rate),
    Metric("benchmark_duration", "Duration", "sec", of_run=lambda run: run.seconds),
]  # fmt: skip
"""Definitions, in the order of reports. `register_metric` adds to them."""


def register_metric(metric: Metric) -> None:
    """Add a metric; it appears in all exports, reports and objectives. Raises `PerfError` if the name is taken."""
    if any(known.name == metric.name for known in METRICS):
        raise PerfError(f"there is already a metric {metric.name}")
    if sum(map(bool, (metric.per_request, metric.pooled, metric.of_run))) != 1:
        raise PerfError(f"metric {metric.name} needs one of per_request, pooled and of_run")
    METRICS.append(metric)


def metric_named(name: str) -> Metric:
    """Return a metric by its name or alias. Raises `PerfError`."""
    for metric in METRICS:
        if metric.name == ALIASES.get(name, name):
            return metric
    raise PerfError(f"there is no metric {name}; there are {', '.join(metric.name for metric in METRICS)}")
