"""One run, prepared for metrics: arrays, summaries, errors and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from neso.engine.text.tokenizer import Tokenizer
from neso.perf.metrics import METRICS, Slo
from neso.perf.records import MS, UNKNOWN, Records, RunResult
from neso.perf.statistics import Array, Summary


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
        """`tokenizer` counts the tokens of output texts if the server does not report them, or to check its counts."""
        self.result = result
        self.slos: tuple[Slo, ...] = tuple(slos)
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
        """Duration from the start of the first request to the last response."""
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
        """Warnings for readers of the figures."""
        return [text for text in (_count_warning(self), _length_warning(self), _lag_warning(self)) if text]


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
