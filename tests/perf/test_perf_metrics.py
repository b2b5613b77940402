"""Metrics against a plain implementation of their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from fake_runs import MS, fake_run, run_of
from hypothesis import given, settings
from hypothesis import strategies as st

from neso.engine.text.tokenizer import Tokenizer
from neso.models import SHIPPED_MODELS
from neso.perf.errors import PerfError
from neso.perf.measurement import Measurement
from neso.perf.metrics import METRICS, Metric, Slo, parse_slos, register_metric
from neso.perf.records import UNKNOWN, RequestRecord


@st.composite
def record_lists(draw: st.DrawFn) -> list[RequestRecord]:
    records = []
    with_tokens = draw(st.booleans())
    for number in range(draw(st.integers(1, 8))):
        start = draw(st.integers(MS + 1, 10**9))
        gaps = draw(st.lists(st.integers(0, 50 * MS), max_size=6))
        arrivals = np.cumsum([start + draw(st.integers(1, 50 * MS)), *gaps]).tolist() if gaps else []
        tokens = draw(st.lists(st.integers(0, 4), min_size=len(arrivals), max_size=len(arrivals)))
        kind = draw(st.sampled_from(["", "", "", "timeout", "http"]))
        records.append(
            RequestRecord(
                number=number,
                intended_ns=start - draw(st.integers(0, MS)),
                start_ns=start,
                arrivals_ns=arrivals,
                event_tokens=tokens if with_tokens else [],
                end_ns=(arrivals or [start])[-1] + draw(st.integers(0, MS)),
                output_tokens=draw(st.one_of(st.just(UNKNOWN), st.integers(0, 30))),
                input_tokens=draw(st.one_of(st.just(UNKNOWN), st.integers(0, 30))),
                requested_input_tokens=draw(st.one_of(st.just(UNKNOWN), st.integers(1, 30))),
                error_kind=kind,
                status=500 if kind == "http" else 0,
                warm_up=draw(st.booleans()),
            )
        )
    return records


def plain_metrics(records: list[RequestRecord]) -> dict[str, list[float]]:
    """The definitions of docs/reference/perf.md, one request at a time."""
    good = [one for one in records if one.ok and not one.warm_up]
    found: dict[str, list[float]] = {}
    usage = any(one.output_tokens != UNKNOWN for one in good)
    by_event = (
        bool(good)
        and all(one.event_tokens or not one.arrivals_ns for one in good)
        and any(one.arrivals_ns for one in good)
    )
    for one in good:
        arrivals = one.arrivals_ns
        output = float(sum(one.event_tokens)) if by_event else float(len(arrivals))
        if usage:
            output = float(one.output_tokens) if one.output_tokens != UNKNOWN else math.nan
        end = arrivals[-1] if arrivals else one.end_ns
        add = lambda name, value: found.setdefault(name, []).append(value)  # noqa: E731
        add("request_latency", (end - one.start_ns) / MS)
        add("intended_request_latency", (end - one.intended_ns) / MS)
        if not math.isnan(output):
            add("output_sequence_length", output)
        known = [n for n in (one.input_tokens, one.requested_input_tokens) if n != UNKNOWN]
        if known:
            add("input_sequence_length", float(known[0]))
        if arrivals:
            add("time_to_first_token", (arrivals[0] - one.start_ns) / MS)
        for before, after in itertools.pairwise(arrivals):
            add("inter_chunk_latency", (after - before) / MS)
        if len(arrivals) > 1:
            add("time_to_second_token", (arrivals[1] - arrivals[0]) / MS)
            rest = output - (one.event_tokens[0] if by_event else 1)
            if rest > 0:
                add("inter_token_latency", (end - arrivals[0]) / MS / rest)
    return found


@given(record_lists())
@settings(max_examples=40)
def test_metrics_equal_the_plain_definitions(records):
    measurement = Measurement(run_of(records))
    expected = plain_metrics(records)
    for name in (
        "request_latency",
        "intended_request_latency",
        "time_to_first_token",
        "time_to_second_token",
        "inter_token_latency",
        "inter_chunk_latency",
        "output_sequence_length",
        "input_sequence_length",
    ):
        values = expected.get(name, [])
        summary = measurement.summaries.get(name)
        assert (summary is None) == (not values), name
        if summary is not None:
            assert summary.count == len(values), name
            assert summary.avg == pytest.approx(np.mean(values), rel=1e-9, abs=1e-9), name
            assert summary.percentiles[99] == pytest.approx(np.percentile(values, 99), rel=1e-9, abs=1e-9), (
                name
            )
            assert summary.min <= summary.avg <= summary.max


@given(record_lists())
@settings(max_examples=40)
def test_counts_and_rates(records):
    measurement = Measurement(run_of(records))
    measured = [one for one in records if not one.warm_up]
    good = [one for one in measured if one.ok]
    seconds = max(1e-9, (max(one.end_ns for one in records) - min(one.start_ns for one in records)) * 1e-9)
    assert measurement.summaries["request_count"].avg == len(good)
    assert measurement.summaries["error_request_count"].avg == len(measured) - len(good)
    assert measurement.summaries["request_throughput"].avg == pytest.approx(len(good) / seconds)
    assert sum(number for number, _ in measurement.errors.values()) == len(measured) - len(good)


def test_goodput_counts_requests_that_meet_all_objectives():
    start = 10**9
    records = [
        RequestRecord(
            start_ns=start,
            intended_ns=start,
            arrivals_ns=[start + ttft * MS, start + (ttft + itl) * MS],
            end_ns=start + 100 * MS,
            output_tokens=2,
        )
        for ttft, itl in ((10, 5), (10, 30), (50, 5), (20, 20))
    ]
    slos = parse_slos(["ttft:20 inter_token_latency:20"])
    measurement = Measurement(run_of(records), slos=slos)
    assert measurement.good.tolist() == [True, False, False, True]
    assert measurement.summaries["goodput"].avg == pytest.approx(2 / 0.1)
    assert measurement.summaries["good_request_share"].avg == 50


def test_an_objective_of_a_rate_is_a_minimum():
    assert parse_slos(["output_token_throughput_per_user:30"]) == (
        Slo("output_token_throughput_per_user", 30, at_least=True),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("speed:3", "expected METRIC:VALUE"),
        ("ttft:fast", "got 'fast'"),
        ("ttft:-1", "at least 0"),
        ("ttft:1 time_to_first_token:2", "given twice"),
        ("goodput:1", "expected METRIC:VALUE"),
    ],
)
def test_invalid_objectives_are_rejected(text, message):
    with pytest.raises(PerfError, match=message):
        parse_slos([text])


def test_output_tokens_come_from_usage_then_events_then_tokenizer_then_chunks():
    tokenizer = Tokenizer.from_directory(SHIPPED_MODELS["neso-pilot"])
    text = "one two three four five"
    count = len(tokenizer.encode(text, add_special_tokens=False))

    def lengths(tokenizer=None, **fields):
        record = RequestRecord(start_ns=1, arrivals_ns=[2, 3], end_ns=3, **fields)
        measurement = Measurement(run_of([record]), tokenizer=tokenizer)
        return measurement.output_tokens.tolist(), measurement.output_tokens_source

    assert lengths(tokenizer, output_tokens=9, event_tokens=[1, 2], output_text=text) == ([9], "usage")
    assert lengths(tokenizer, event_tokens=[1, 2], output_text=text) == ([3], "events")
    assert lengths(tokenizer, output_text=text) == ([count], "tokenizer")
    assert lengths() == ([2], "chunks")


def test_a_difference_of_the_tokenizer_is_shown():
    tokenizer = Tokenizer.from_directory(SHIPPED_MODELS["neso-pilot"])
    text = "one two three"
    count = len(tokenizer.encode(text, add_special_tokens=False))
    record = RequestRecord(
        start_ns=1, arrivals_ns=[2, 3], end_ns=3, output_tokens=count + 1, output_text=text
    )
    measurement = Measurement(run_of([record]), tokenizer=tokenizer)
    assert measurement.summaries["output_length_difference"].avg == -1
    assert any("differs from usage" in warning for warning in measurement.warnings)


def test_short_responses_are_warned_about():
    record = RequestRecord(
        start_ns=1, arrivals_ns=[2, 3], end_ns=3, output_tokens=2, requested_output_tokens=8
    )
    assert any("shorter than requested" in text for text in Measurement(run_of([record])).warnings)


def test_late_starts_are_warned_about_and_counted_from_the_intended_start():
    record = RequestRecord(intended_ns=0, start_ns=90 * MS, arrivals_ns=[100 * MS], end_ns=100 * MS)
    measurement = Measurement(run_of([record]))
    assert measurement.summaries["request_latency"].avg == 10
    assert measurement.summaries["intended_request_latency"].avg == 100
    assert any("start late" in text for text in measurement.warnings)


def test_without_streaming_there_are_no_token_latencies():
    measurement = Measurement(fake_run(streaming=False))
    assert (
        not {"time_to_first_token", "inter_token_latency", "inter_chunk_latency"}
        & measurement.summaries.keys()
    )
    assert "request_latency" in measurement.summaries


def test_a_run_without_success_has_only_counts():
    record = RequestRecord(start_ns=1, end_ns=2, error_kind="connect", error_message="refused")
    measurement = Measurement(run_of([record]))
    assert measurement.errors == {"connect": (1, "refused")}
    assert measurement.summaries["error_request_rate"].avg == 100
    assert "request_latency" not in measurement.summaries


def test_registered_metrics_are_computed_and_can_be_objectives():
    metric = Metric("bytes_received", "Bytes", "bytes", lambda run: run.column("response_bytes"))
    register_metric(metric)
    try:
        with pytest.raises(PerfError, match="already"):
            register_metric(metric)
        record = RequestRecord(start_ns=1, arrivals_ns=[2], end_ns=2, response_bytes=40)
        measurement = Measurement(run_of([record]), slos=parse_slos(["bytes_received:50"]))
        assert measurement.summaries["bytes_received"].avg == 40
        assert measurement.good.all()
    finally:
        METRICS.remove(metric)
