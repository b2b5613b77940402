"""Gauge of LoRA requests: names of adapters in use."""

from __future__ import annotations

from neso.backends.llm.metrics import AdapterMetrics
from neso.engine.lora.config import LoraConfig
from neso.server.metrics.registry import MetricsRegistry


def test_unused_names_are_removed():
    registry = MetricsRegistry()
    metrics = AdapterMetrics(registry, "pilot", "1", LoraConfig(enable_lora=True))
    for number in range(50):
        metrics.add_waiting(f"made-up-{number}")
        if number % 2:
            metrics.start(f"made-up-{number}")
        metrics.remove(f"made-up-{number}", started=bool(number % 2))
    metrics.add_waiting("real")
    metrics.add_waiting("real")
    metrics.start("real")
    assert dict(metrics._running) == dict(metrics._waiting) == {"real": 1}
    shown = registry.render().decode()
    assert 'running_lora_adapters="real",' in shown and "made-up" not in shown
