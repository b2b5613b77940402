"""Counters that are read at the scrape."""

from neso.server.metrics.registry import MetricsRegistry


def test_a_watched_total_is_a_counter():
    registry, count = MetricsRegistry(), [3]
    unwatch = registry.watch("engine:steps_total", "Steps.", "m", "1", lambda: count[0])
    count[0] = 5
    assert registry.render().decode() == (
        "# HELP engine:steps_total Steps.\n"
        "# TYPE engine:steps_total counter\n"
        'engine:steps_total{model="m",version="1"} 5\n'
    )
    unwatch()
    assert registry.render() == b""


def test_other_names_are_gauges():
    registry = MetricsRegistry()
    registry.watch("engine:running", "Running.", "m", "1", lambda: 2)
    assert "# TYPE engine:running gauge\n" in registry.render().decode()
