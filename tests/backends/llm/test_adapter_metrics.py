"""Adapters that clients name: in the gauge while they are used, and nowhere afterwards."""

from __future__ import annotations

from neso.backends.llm.metrics import AdapterMetrics
from neso.engine.lora.config import LoraConfig
from neso.server.metrics.registry import MetricsRegistry


def test_names_that_nobody_uses_are_forgotten():
    registry = MetricsRegistry()
    metrics = AdapterMetrics(registry, "pilot", "1", LoraConfig(enable_lora=True))
    for number in range(50):
        metrics.arrived(f"made-up-{number}")
        if number % 2:
            metrics.began(f"made-up-{number}")
        metrics.ended(f"made-up-{number}", had_begun=bool(number % 2))
    metrics.arrived("real")
    metrics.arrived("real")
    metrics.began("real")
    assert dict(metrics._running) == dict(metrics._waiting) == {"real": 1}
    shown = registry.render().decode()
    assert 'running_lora_adapters="real",' in shown and "made-up" not in shown
