"""Prometheus metrics: the server's own, read from the statistics when scraped, those of backends and of the machine."""

from neso.server.metrics.config import MetricsConfig, Quantile
from neso.server.metrics.registry import MetricsRegistry
from neso.server.metrics.text import CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "MetricsConfig", "MetricsRegistry", "Quantile"]
