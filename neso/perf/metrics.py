"""Metrics of a run, from its records.

`Measurement` gives the arrays that definitions need; `METRICS` lists the definitions. docs/reference/perf.md explains
them. Times are milliseconds unless the unit says otherwise. Only complete responses count; requests of the warm-up
never do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from neso.engine.text.tokenizer import Tokenizer
from neso.perf.errors import PerfError
from neso.perf.records import UNKNOWN, Records, RunResult
from neso.perf.statistics import Array, Summary

MS = 1e-6
"""Milliseconds per nanosecond."""


def endpoint_setting(run: RunResult, name: str) -> Any:
    """Return an option of the endpoint of a run, None if it is not known."""
    return run.settings.get("endpoint", {}).get(name)


class Measurement:
    """One run, prepared for metrics.

    Arrays have one element for each of `records`, the complete responses; a value that does not exist is NaN.
    """

    def __init__(
        self, result: RunResult, *, tokenizer: Tokenizer | None = None, slos: Sequence[Slo] = ()
    ) -> None:
        """`tokenizer` counts tokens of output texts, where the server does not report them, and as a check."""
        self.result = result
        self.slos = tuple(slos)
        self._tokenizer = tokenizer
        measured = result.records.select(~result.records.columns["warm_up"])
        self.all_records: Records = measured
        """All requests without the warm-up, also failed and cancelled ones."""
        self.records: Records = measured.select(measured.ok)

    def __len__(self) -> int:
        return len(self.records)

    def column(self, name: str) -> Array:
        """Return a number of the records as floats; counts that are not reported are NaN."""
        values = self.records.columns[name].astype(np.float64)
        return np.where(values == UNKNOWN, np.nan, values)

    @cached_property
    def seconds(self) -> float:
        """Duration: from the start of the first request to the last response."""
        return max((self.result.end_ns - self.result.start_ns) * 1e-9, 1e-9)

    @cached_property
    def num_events(self) -> Array:
        """Events with output of each request."""
        return np.diff(self.records.arrival_offsets).astype(np.float64)

    @cached_property
    def streaming(self) -> bool:
        """Whether responses are streamed: as set, or else if any response has more than one event."""
        wanted = endpoint_setting(self.result, "streaming")
        return bool(wanted) if wanted is not None else bool((self.num_events > 1).any())

    def arrival(self, position: int) -> Array:
        """Return the arrival of the event at `position` (0 first, -1 last) in ns; NaN without such an event."""
        offsets = self.records.arrival_offsets
        at = offsets[:-1] + position if position >= 0 else offsets[1:] + position
        exists = (at >= offsets[:-1]) & (at < offsets[1:])
        found = np.full(len(at), np.nan)
        found[exists] = self.records.arrivals_ns[at[exists]]
        return found

    @cached_property
    def end_ns(self) -> Array:
        """Arrival of the last event with output, or else of the end of the response."""
        last = self.arrival(-1)
        return np.where(np.isnan(last), self.column("end_ns"), last)

    @cached_property
    def reported_events(self) -> bool:
        """Whether the server reports the tokens of each event."""
        tokens = self.records.event_tokens
        return bool(len(tokens)) and bool((tokens != UNKNOWN).all())

    @cached_property
    def retokenized_output(self) -> Array | None:
        """Tokens of each output text by the tokenizer; None without tokenizer or texts."""
        texts = self.records.output_text
        if self._tokenizer is None or not any(texts):
            return None
        kept = [i for i, text in enumerate(texts) if text is not None]
        ids = self._tokenizer.encode_batch([texts[i] or "" for i in kept], add_special_tokens=False)
        counts = np.full(len(texts), np.nan)
        counts[kept] = [len(one) for one in ids]
        return counts

    @cached_property
    def output_tokens(self) -> Array:
        """Output tokens by `usage`, else by the events, else by the tokenizer, else one for each event."""
        return self._output[0]

    @cached_property
    def output_tokens_source(self) -> str:
        """Where `output_tokens` come from: usage, events, tokenizer, or chunks."""
        return self._output[1]

    @cached_property
    def _output(self) -> tuple[Array, str]:
        reported = self.column("output_tokens")
        if not np.isnan(reported).all() or not len(reported):
            return reported, "usage"
        if self.reported_events:
            return self._sums(self.records.event_tokens.astype(np.float64)), "events"
        if self.retokenized_output is not None:
            return self.retokenized_output, "tokenizer"
        return (self.num_events, "chunks") if self.streaming else (reported, "usage")

    def _sums(self, values: Array) -> Array:
        """Return the sum of a value of each event over each request."""
        sums = np.concatenate([[0.0], np.cumsum(values)])
        offsets = self.records.arrival_offsets
        return sums[offsets[1:]] - sums[offsets[:-1]]

    @cached_property
    def input_tokens(self) -> Array:
        """Prompt tokens by `usage`, else as the input source counted them."""
        reported, requested = self.column("input_tokens"), self.column("requested_input_tokens")
        return np.where(np.isnan(reported), requested, reported)

    @cached_property
    def first_event_tokens(self) -> Array:
        """Tokens of the first event of each request, as the server reports them, else 1."""
        if not self.reported_events:
            return np.ones(len(self))
        first = np.minimum(self.records.arrival_offsets[:-1], len(self.records.event_tokens) - 1)
        return self.records.event_tokens[first].astype(np.float64)

    @cached_property
    def gap_requests(self) -> np.ndarray:
        """Index of the request of each gap in `gaps`."""
        return np.repeat(np.arange(len(self)), np.maximum(self.num_events - 1, 0).astype(np.int64))

    @cached_property
    def _gap_ends(self) -> np.ndarray:
        """Index of the event at the end of each gap."""
        inside = np.ones(len(self.records.arrivals_ns), np.bool_)
        starts = self.records.arrival_offsets[:-1]
        inside[starts[self.num_events > 0]] = False
        return np.flatnonzero(inside)

    @cached_property
    def gaps(self) -> Array:
        """Milliseconds between adjacent events of a request, of all requests."""
        ends = self._gap_ends
        return (self.records.arrivals_ns[ends] - self.records.arrivals_ns[ends - 1]) * MS

    @cached_property
    def gap_tokens(self) -> Array:
        """Tokens of the event at the end of each gap; if not reported, the mean of its request."""
        if self.reported_events:
            return self.records.event_tokens[self._gap_ends].astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            means = (self.output_tokens - 1) / (self.num_events - 1)
        return np.maximum(np.nan_to_num(means[self.gap_requests], nan=1.0), 1e-9)

    @cached_property
    def values(self) -> dict[str, Array]:
        """Values of each per-request metric, NaN where a request has none."""
        found = {metric.name: metric.per_request(self) for metric in METRICS if metric.per_request}
        return {name: values for name, values in found.items() if values is not None}

    @cached_property
    def good(self) -> np.ndarray:
        """Bool array: requests that meet all service level objectives. A missing value does not meet one."""
        good = np.ones(len(self), np.bool_)
        for slo in self.slos:
            values = self.values.get(slo.metric, np.full(len(self), np.nan))
            good &= (values >= slo.limit) if slo.at_least else (values <= slo.limit)
        return good

    @cached_property
    def summaries(self) -> dict[str, Summary]:
        """Summary of each metric that has values, by name; those of the whole run have a single value."""
        found = {}
        for metric in METRICS:
            if metric.per_request is not None:
                values = self.values.get(metric.name)
            elif metric.pooled is not None:
                values = metric.pooled(self)
            else:
                single = metric.of_run(self) if metric.of_run else None
                values = None if single is None else np.array([single])
            if values is not None and len(values := values[~np.isnan(values)]):
                found[metric.name] = Summary.of(values)
        return found

    @cached_property
    def errors(self) -> dict[str, tuple[int, str]]:
        """Number of failed requests and an example message by kind of error; cancelled requests are "cancelled"."""
        strings, columns = self.all_records.strings, self.all_records.columns
        kinds = [
            "cancelled" if cancelled and not kind else f"http {status}" if kind == "http" else kind
            for kind, status, cancelled in zip(
                strings["error_kind"], columns["status"], columns["cancelled"], strict=True
            )
        ]
        messages = dict(zip(kinds, strings["error_message"], strict=True))
        return {kind: (number, messages[kind]) for kind, number in Counter(kinds).most_common() if kind}

    @cached_property
    def warnings(self) -> list[str]:
        """What a reader of the figures must know."""
        return [text for text in (_count_warning(self), _length_warning(self), _lag_warning(self)) if text]


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
"""Definitions in the order of the reports. `register_metric` adds others."""


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


def _count_warning(run: Measurement) -> str:
    if run.output_tokens_source == "chunks" and len(run):
        return "The server reports no token counts and no tokenizer is given: each chunk counts as one output token."
    difference = run.values.get("output_length_difference")
    if difference is not None and np.nanmax(np.abs(difference), initial=0) > 0:
        share = 100 * float(np.nanmean(difference != 0))
        mean = float(np.nanmean(difference))
        return (
            f"Re-tokenized output differs from usage in {share:.0f} % of the requests, "
            f"by {mean:+.1f} tokens on average."
        )
    return ""


def _length_warning(run: Measurement) -> str:
    share = run.values.get("output_length_share")
    if share is None or np.isnan(share).all():
        return ""
    short = 100 * float(np.mean(share[~np.isnan(share)] < 95))
    if short < 5:
        return ""
    return (
        f"{short:.0f} % of the responses are more than 5 % shorter than requested. For fixed lengths, "
        "let the server ignore end tokens: --extra-inputs ignore_eos:true."
    )


def _lag_warning(run: Measurement) -> str:
    lag, latency = run.values.get("client_lag"), run.values.get("request_latency")
    if lag is None or latency is None or not len(lag):
        return ""
    late, typical = float(np.percentile(lag, 99)), float(np.nanmedian(latency))
    if late <= max(5.0, 0.1 * typical):
        return ""
    return (
        f"Requests start late: the 99th percentile of the client's lag is {late:.1f} ms. "
        "Latencies from the intended start include it."
    )


def as_dict(run: Measurement) -> dict[str, dict[str, Any]]:
    """Return unit and statistics of each metric, by name."""
    found: dict[str, dict[str, Any]] = {}
    for metric in METRICS:
        summary = run.summaries.get(metric.name)
        if summary is None:
            continue
        if metric.of_run:
            found[metric.name] = {"unit": metric.unit, "avg": summary.avg}
            continue
        percentiles = {
            f"p{share}": value for share, value in sorted(summary.percentiles.items(), reverse=True)
        }
        found[metric.name] = {
            "unit": metric.unit, "avg": summary.avg, **percentiles,
            "min": summary.min, "max": summary.max, "std": summary.std, "count": summary.count,
        }  # fmt: skip
    return found
