"""Metrics configuration, `--metrics-config`."""

from __future__ import annotations

import pytest

from neso.server.errors import InvalidArgument
from neso.server.metrics.config import MetricsConfig, Quantile


def test_defaults():
    config = MetricsConfig.parse([])
    assert config == MetricsConfig()
    assert config.counter_latencies and not config.summary_latencies and not config.histogram_latencies
    assert [quantile.text for quantile in config.summary_quantiles] == ["0.5", "0.9", "0.95", "0.99", "0.999"]
    assert (config.cpu, config.gpu, config.interval) == (True, True, 2.0)


def test_settings():
    config = MetricsConfig.parse(
        [
            "counter_latencies=false",
            "summary_latencies = true",
            "histogram_latencies=TRUE",
            "summary_quantiles=0.5:0.05,0.9:0.01",
        ],
        cpu=False,
        interval_ms=500,
    )
    assert (config.counter_latencies, config.summary_latencies, config.histogram_latencies) == (
        False,
        True,
        True,
    )
    assert config.summary_quantiles == (Quantile(0.5, "0.5"), Quantile(0.9, "0.9"))
    assert (config.cpu, config.gpu, config.interval) == (False, True, 0.5)


@pytest.mark.parametrize(
    "setting",
    [
        "summary_latencies",
        "summary_latencies=yes",
        "latencies=true",
        "summary_quantiles=0.5",
        "summary_quantiles=half:0.1",
        "summary_quantiles=1.5:0.1",
        "summary_quantiles=nan:0.1",
        "summary_quantiles=0.5:",
        "summary_quantiles=",
    ],
)
def test_invalid_settings(setting):
    with pytest.raises(InvalidArgument, match=r"expected|unknown"):
        MetricsConfig.parse([setting])


def test_invalid_interval():
    with pytest.raises(InvalidArgument, match="interval"):
        MetricsConfig.parse([], interval_ms=-1)
