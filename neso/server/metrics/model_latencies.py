"""What is measured of a model beyond the counters, for those who asked for it."""

from __future__ import annotations

import logging
from typing import Any

from neso.server.metrics.config import MetricsConfig, Quantile
from neso.server.metrics.histogram import Histogram
from neso.server.metrics.latency_summary import LatencySummary

logger = logging.getLogger(__name__)

FIRST_RESPONSE_FAMILY = "nv_inference_first_response_histogram_ms"
FIRST_RESPONSE_BUCKETS = (100.0, 500.0, 2000.0, 5000.0)


class ModelLatencies:
    """Summaries of the stages of requests that ended well. Belongs to the core's loop."""

    def __init__(self, quantiles: tuple[Quantile, ...]) -> None:
        self.quantiles = quantiles
        self.request = LatencySummary()
        self.queue = LatencySummary()
        self.compute_input = LatencySummary()
        self.compute_infer = LatencySummary()
        self.compute_output = LatencySummary()
        self.cache_hit = LatencySummary()
        self.cache_miss = LatencySummary()

    def add_success(self, now: int, request: int, stages: tuple[int, int, int, int]) -> None:
        """A request was computed: ns in all, and in the queue, compute input, infer and output."""
        queue, compute_input, compute_infer, compute_output = stages
        self.request.add(request, now)
        self.queue.add(queue, now)
        self.compute_input.add(compute_input, now)
        self.compute_infer.add(compute_infer, now)
        self.compute_output.add(compute_output, now)

    def add_cache_hit(self, now: int, queue: int, cache: int) -> None:
        """A request was answered by the response cache: ns that it waited, and that the cache took."""
        self.queue.add(queue, now)
        self.cache_hit.add(cache, now)

    @classmethod
    def of(cls, config: MetricsConfig) -> ModelLatencies | None:
        """None where no summaries were asked for."""
        return cls(config.summary_quantiles) if config.summary_latencies else None


def first_response_histogram(config: MetricsConfig, model_config: Any) -> Histogram | None:
    """Milliseconds to the first response: None unless asked for, and for models that are not decoupled.

    Raises `InvalidArgument` for buckets (of the `ModelConfig`'s `model_metrics`) that do not increase.
    """
    buckets: tuple[float, ...] = FIRST_RESPONSE_BUCKETS
    for control in model_config.model_metrics.metric_control:
        family = control.metric_identifier.family
        if family != FIRST_RESPONSE_FAMILY:
            logger.warning("model '%s': metric '%s' cannot be configured", model_config.name, family)
        elif control.histogram_options.buckets:
            buckets = Histogram.check_bounds(family, control.histogram_options.buckets)
    if not config.histogram_latencies or not model_config.model_transaction_policy.decoupled:
        return None
    return Histogram(buckets)
