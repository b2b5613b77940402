"""The log lines about the load of language models."""

from __future__ import annotations

import time

import pytest

from neso.backends import generation_metrics as families
from neso.backends.generation_metrics import GenerationMetrics
from neso.cli.throughput_log import ThroughputLog
from neso.server.metrics.registry import MetricsRegistry, ModelMetrics


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_line_has_rates_and_gauges(clock: list[float]) -> None:
    registry = MetricsRegistry()
    model = ModelMetrics(registry, "m", "1")
    metrics = GenerationMetrics(model)
    gauges = {families.REQUESTS_RUNNING: 3.0, families.REQUESTS_WAITING: 2.0, families.KV_CACHE_USAGE: 0.25}
    counters = {families.PREFIX_QUERIES: 0.0, families.PREFIX_HITS: 0.0, families.PREEMPTIONS: 0.0}
    for family in (*gauges, *counters):
        model.watch(family, lambda family=family: {**gauges, **counters}[family])
    log = ThroughputLog(registry)
    metrics.prompt_tokens.inc(1000)
    log.lines()

    clock[0] += 2
    metrics.prompt_tokens.inc(500)
    metrics.generation_tokens.inc(60)
    counters[families.PREFIX_QUERIES], counters[families.PREFIX_HITS] = 500, 125
    counters[families.PREEMPTIONS] = 1
    expected = (
        "m: 3 running, 2 waiting, 250.0 prompt tokens/s, 30.0 generated tokens/s, KV cache 25.0% used, "
        "25.0% of prompt tokens from the prefix cache, 1 preemptions"
    )
    assert log.lines() == [expected]


def test_idle_models_have_no_line(clock: list[float]) -> None:
    registry = MetricsRegistry()
    busy, idle = (GenerationMetrics(ModelMetrics(registry, name, "1")) for name in ("busy", "idle"))
    idle.generation_tokens.inc(7)
    log = ThroughputLog(registry)
    log.lines()
    clock[0] += 10
    busy.generation_tokens.inc(10)
    assert [line.split(",")[0] for line in log.lines()] == ["busy: 0 running"]
    clock[0] += 10
    assert log.lines() == []


def test_tokens_of_other_processes_count(clock: list[float]) -> None:
    registry = MetricsRegistry()
    metrics = GenerationMetrics(ModelMetrics(registry, "m", "1"))
    log = ThroughputLog(registry)
    log.lines()
    clock[0] += 1
    metrics.generation_tokens.inc(1)
    key = ("vllm:generation_tokens_total", (("model", "m"), ("version", "1")))
    registry.elsewhere = {key: 9.0}
    assert "10.0 generated tokens/s" in log.lines()[0]
