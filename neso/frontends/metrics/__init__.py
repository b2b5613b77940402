"""Prometheus metrics over HTTP."""

from neso.frontends.metrics.frontend import MetricsHttp, MetricsOptions

__all__ = ["MetricsHttp", "MetricsOptions"]
