"""Prometheus metrics over HTTP."""

from neso.frontends.metrics.frontend import MetricsHttp

__all__ = ["MetricsHttp"]
