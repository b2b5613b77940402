"""Metrics registry: values read at the scrape, and shared families."""

import pytest

from neso.server.errors import AlreadyExists
from neso.server.metrics.registry import Family, MetricsRegistry

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
