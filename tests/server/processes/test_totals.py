"""Statistics and metrics of several processes are added, also of processes that have ended."""

from __future__ import annotations

import time

from prometheus_client import Counter, Histogram

from neso.server.metrics.config import MetricsConfig
from neso.server.metrics.latency import ModelLatencies
from neso.server.metrics.registry import Family, MetricsRegistry
from neso.server.processes.totals import ProcessTotals, Totals
from neso.server.statistics import FailureReason, ModelStatistics, ResponseOutcome, Timeline


def statistics(successes: int, failures: int) -> ModelStatistics:
    result = ModelStatistics("m", "1", ModelLatencies.from_config(MetricsConfig(summary_latencies=True)))
    for _ in range(successes):
        timeline = Timeline()
        timeline.compute_start = time.monotonic_ns()
        result.responses.record(timeline, time.monotonic_ns(), ResponseOutcome.SUCCESS)
        result.record_execution(2, timeline)
        result.record_success(timeline, 2)
    for _ in range(failures):
        result.record_failure(Timeline(), FailureReason.CANCELED)
    return result


def leaves(value) -> list[int]:
    """Return all numbers in a snapshot, apart from batch sizes and the time of the last request."""
    if isinstance(value, dict):
        skipped = ("batch_size", "last_inference")
        return [n for key, inner in value.items() if key not in skipped for n in leaves(inner)]
    if isinstance(value, list):
        return [n for inner in value for n in leaves(inner)]
    return [value] if isinstance(value, int) else []


def test_statistics_are_added():
    one, two = statistics(3, 1), statistics(2, 4)
    both = one.merged(two)
    parts = zip(leaves(one.snapshot()), leaves(two.snapshot()), strict=True)
    assert leaves(both.snapshot()) == [a + b for a, b in parts]
    assert both.failures[FailureReason.CANCELED] == 5
    assert both.latencies.request.count == 5
    median = both.latencies.request.quantiles((0.5,), time.monotonic_ns())
    assert median[0] > 0


def test_counts_of_ended_processes_stay():
    totals = Totals()
    key = ("requests_total", ())
    totals.add_ended(ProcessTotals({7: (statistics(2, 0), 5)}, {key: 3.0}))
    totals.update([ProcessTotals({7: (statistics(1, 0), 1)}, {key: 4.0})])
    merged, pending = totals.models[7]
    assert (merged.success.count, pending) == (3, 1)  # requests of an ended process are not pending
    assert totals.samples == {key: 7.0}
    totals.forget(set())
    totals.update([])
    assert totals.models == {} and totals.samples == {key: 3.0}


def test_metrics_of_other_processes_are_rendered():
    here, there = MetricsRegistry(), MetricsRegistry()
    for registry, amount in ((here, 2), (there, 5)):
        counter: Counter = registry.counter(Family("n_total", "counter", "help"))
        counter.labels("m", "1").inc(amount)
        histogram: Histogram = registry.histogram(Family("h", "histogram", "help", buckets=(1.0, 10.0)))
        histogram.labels("m", "1").observe(amount)
    there.counter(Family("n_total", "counter", "help")).labels("other", "1").inc(9)
    here.elsewhere = there.counts()
    worker = MetricsRegistry()
    worker.counter(Family("n_total", "counter", "help")).labels("m", "1").inc(10)
    for _ in range(2):  # a worker sends what is new
        here.add(worker.counts().items())
    lines = here.render().decode().splitlines()
    assert 'n_total{model="m",version="1"} 27' in lines
    assert 'n_total{model="other",version="1"} 9' in lines
    assert 'h_count{model="m",version="1"} 2' in lines and 'h_sum{model="m",version="1"} 7' in lines
    assert 'h_bucket{model="m",version="1",le="1"} 0' in lines
    assert 'h_bucket{model="m",version="1",le="10"} 2' in lines
