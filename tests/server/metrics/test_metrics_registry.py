"""Metrics registry: values read at the scrape, and shared families."""

import pytest

from neso.server.errors import AlreadyExists
from neso.server.metrics.registry import Family, MetricsRegistry, ModelMetrics

STEPS = Family("engine:steps_total", "counter", "Steps.")


def test_watched_counter():
    registry, count = MetricsRegistry(), [3]
    unwatch = registry.watch(STEPS, ("m", "1"), lambda: count[0])
    count[0] = 5
    assert registry.render().decode() == (
        "# HELP engine:steps_total Steps.\n"
        "# TYPE engine:steps_total counter\n"
        'engine:steps_total{model="m",version="1"} 5\n'
    )
    unwatch()
    assert registry.render() == b""


def test_watched_gauge():
    registry = MetricsRegistry()
    registry.watch(Family("engine:running", "gauge", "Running."), ("m", "1"), lambda: 2)
    assert "# TYPE engine:running gauge\n" in registry.render().decode()


def test_last_watch_of_the_same_labels_wins():
    registry = MetricsRegistry()
    unwatch_first = registry.watch(STEPS, ("m", "1"), lambda: 1)
    unwatch_second = registry.watch(STEPS, ("m", "1"), lambda: 2)
    unwatch_first()
    assert [sample.value for sample in registry.samples(STEPS.name)] == [2]
    unwatch_second()
    assert registry.samples(STEPS.name) == []


def test_family_with_another_kind_or_other_labels_is_rejected():
    registry = MetricsRegistry()
    registry.watch(STEPS, ("m", "1"), lambda: 1)
    with pytest.raises(AlreadyExists, match="'engine:steps_total' exists already with another kind"):
        registry.counter(STEPS)
    with pytest.raises(AlreadyExists):
        registry.watch(Family(STEPS.name, "counter", "Steps.", ("model",)), ("m",), lambda: 1)


def test_models_with_one_name_in_two_namespaces_have_their_own_series():
    registry = MetricsRegistry(namespaced=True)
    reasons = Family("reasons", "counter", "Reasons.", ("model", "version", "reason"))
    waits = Family("waits", "histogram", "Waits.", buckets=(1.0,))
    for namespace, value in (("one", 1), ("two", 2)):
        model = ModelMetrics(registry, "m", "1", namespace)
        model.watch(STEPS, lambda value=value: value)
        model.counter(reasons, "stop").inc(value)
        model.histogram(waits).observe(value)
    lines = registry.render().decode().splitlines()
    for value, namespace in ((1, "one"), (2, "two")):
        labels = f'model="m",namespace="{namespace}"'
        assert f'engine:steps_total{{{labels},version="1"}} {value}' in lines
        assert f'reasons_total{{{labels},reason="stop",version="1"}} {value}' in lines
        assert f'waits_sum{{{labels},version="1"}} {value}' in lines


def test_without_namespaces_there_is_no_such_label():
    registry = MetricsRegistry()
    ModelMetrics(registry, "m", "1", "one").watch(STEPS, lambda: 3)
    assert 'engine:steps_total{model="m",version="1"} 3' in registry.render().decode()
