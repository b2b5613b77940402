"""Model metrics with Triton's names, read from the models' statistics at each scrape."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from neso.server.metrics.config import MetricsConfig
from neso.server.metrics.latency import FIRST_RESPONSE_FAMILY, LatencySummary, ModelLatencies
from neso.server.metrics.registry import Family

if TYPE_CHECKING:
    from neso.server.model import Model


class _ModelMetric(NamedTuple):
    """A family and the function that reads its samples from a model."""

    family: Family
    samples: Callable[[Model, str], Iterable[Sample]]


def _value(name: str, kind: str, help: str, read: Callable[[Model], float]) -> _ModelMetric:
    return _ModelMetric(
        Family(name, kind, help), lambda model, name: (Sample(name, model.metric_labels, read(model)),)
    )


def _cache_counter(name: str, help: str, read: Callable[[Model], float]) -> _ModelMetric:
    """Return a counter that exists only for models that use the response cache."""

    def samples(model: Model, name: str) -> Iterable[Sample]:
        return (Sample(name, model.metric_labels, read(model)),) if model.uses_cache else ()

    return _ModelMetric(Family(name, "counter", help), samples)


def _summary(
    name: str, help: str, read: Callable[[ModelLatencies], LatencySummary], cached: bool | None = None
) -> _ModelMetric:
    """Return a summary; with `cached` only for models with (True) or without (False) a response cache."""

    def samples(model: Model, name: str) -> Iterator[Sample]:
        latencies = model.total_statistics.latencies
        if latencies is None or (cached is not None and model.uses_cache is not cached):
            return
        summary, labels = read(latencies), model.metric_labels
        yield Sample(f"{name}_count", labels, summary.count)
        yield Sample(f"{name}_sum", labels, summary.ns // 1000)
        fractions = tuple(quantile.value for quantile in latencies.quantiles)
        values = summary.quantiles(fractions, time.monotonic_ns())
        for quantile, ns in zip(latencies.quantiles, values, strict=True):
            yield Sample(name, {**labels, "quantile": quantile.text}, ns / 1000)

    return _ModelMetric(Family(name, "summary", help), samples)


def _failures(model: Model, name: str) -> Iterator[Sample]:
    for reason, count in model.total_statistics.failures.items():
        yield Sample(name, {**model.metric_labels, "reason": reason.value}, count)


def _first_response(model: Model, name: str) -> Iterable[Sample]:
    histogram = model.total_statistics.responses.first_response_ms
    return histogram.samples(name, model.metric_labels) if histogram is not None else ()


_COUNTS = (
    _value(
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        lambda model: model.total_statistics.success.count,
    ),
    _ModelMetric(
        Family(
            "nv_inference_request_failure",
            "counter",
            "Number of failed inference requests, all batch sizes",
            ("model", "reason", "version"),
        ),
        _failures,
    ),
    _value(
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        lambda model: model.total_statistics.inference_count,
    ),
    _value(
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        lambda model: model.total_statistics.execution_count,
    ),
    _value(
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda model: model.total_pending_count,
    ),
    _value(
        "nv_model_load_duration_secs",
        "gauge",
        "Model load time in seconds",
        lambda model: model.load_duration,
    ),
)

_COUNTER_LATENCIES = (
    _value(
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda model: model.total_statistics.success.ns // 1000,
    ),
    _value(
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda model: model.total_statistics.queue.ns // 1000,
    ),
    _value(
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda model: model.total_statistics.compute_input.ns // 1000,
    ),
    _value(
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda model: model.total_statistics.compute_infer.ns // 1000,
    ),
    _value(
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda model: model.total_statistics.compute_output.ns // 1000,
    ),
    _cache_counter(
        "nv_cache_num_hits_per_model",
        "Number of cache hits per model",
        lambda model: model.total_statistics.cache_hit.count,
    ),
    _cache_counter(
        "nv_cache_num_misses_per_model",
        "Number of cache misses per model",
        lambda model: model.total_statistics.cache_miss.count,
    ),
    _cache_counter(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda model: model.total_statistics.cache_hit.ns // 1000,
    ),
    _cache_counter(
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda model: model.total_statistics.cache_miss.ns // 1000,
    ),
)

_HISTOGRAM_LATENCIES = (
    _ModelMetric(
        Family(FIRST_RESPONSE_FAMILY, "histogram", "Duration from request to first response in milliseconds"),
        _first_response,
    ),
)

_SUMMARY_LATENCIES = (
    # Omitted for models with a response cache, as in Triton: it would mix cached and computed requests.
    _summary(
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        lambda latencies: latencies.request,
        cached=False,
    ),
    _summary(
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        lambda latencies: latencies.queue,
    ),
    _summary(
        "nv_inference_compute_input_summary_us",
        "Summary of inference compute input duration in microseconds (does not include cached requests)",
        lambda latencies: latencies.compute_input,
    ),
    _summary(
        "nv_inference_compute_infer_summary_us",
        "Summary of inference compute inference duration in microseconds (does not include cached requests)",
        lambda latencies: latencies.compute_infer,
    ),
    _summary(
        "nv_inference_compute_output_summary_us",
        "Summary of inference compute output duration in microseconds (does not include cached requests)",
        lambda latencies: latencies.compute_output,
    ),
    _summary(
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit duration per model, in microseconds",
        lambda latencies: latencies.cache_hit,
        cached=True,
    ),
    _summary(
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss (insert+lookup) duration per model, in microseconds",
        lambda latencies: latencies.cache_miss,
        cached=True,
    ),
)

MODEL_FAMILIES = frozenset(
    metric.family.name for metric in _COUNTS + _COUNTER_LATENCIES + _HISTOGRAM_LATENCIES + _SUMMARY_LATENCIES
)
"""Names of all model families, enabled or not."""


class ModelCollector(Collector):
    """Collects the enabled families from all `models`."""

    def __init__(self, models: Callable[[], Iterable[Model]], config: MetricsConfig) -> None:
        self._models = models
        self._metrics = _enabled(config)

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        for family, samples in self._metrics:
            metric = Metric(family.name, family.help, family.kind)
            # A generator, so that rendering can yield to the event loop between the samples of many models.
            metric.samples = _samples(samples, family.name, models)  # type: ignore[assignment]
            yield metric


def model_families(config: MetricsConfig) -> list[Family]:
    """Return the enabled families. Models add the labels of their `metric_tags`."""
    return [metric.family for metric in _enabled(config)]


def _enabled(config: MetricsConfig) -> list[_ModelMetric]:
    metrics = list(_COUNTS)
    if config.counter_latencies:
        metrics.extend(_COUNTER_LATENCIES)
    if config.histogram_latencies:
        metrics.extend(_HISTOGRAM_LATENCIES)
    if config.summary_latencies:
        metrics.extend(_SUMMARY_LATENCIES)
    return metrics


def _samples(
    read: Callable[[Model, str], Iterable[Sample]], name: str, models: list[Model]
) -> Iterator[Sample]:
    for model in models:
        yield from read(model, name)


KV_CACHE_FAMILY = Family(
    "nv_trt_llm_kv_cache_block_metrics",
    "gauge",
    "TRT LLM KV cache block metrics",
    ("model", "version", "kv_cache_block_type"),
)
"""KV-cache blocks of a language model, published by its backend."""


@dataclass(frozen=True, slots=True)
class KvCacheLoad:
    """Utilization of the KV caches of all models, from 0 to 1, and their total capacity in tokens."""

    utilization: float
    max_tokens: int

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> KvCacheLoad | None:
        """Compute the load from the samples of `KV_CACHE_FAMILY`; None if no model publishes all required values."""
        label = KV_CACHE_FAMILY.labels[-1]
        models: defaultdict[frozenset[tuple[str, str]], dict[str, float]] = defaultdict(dict)
        for sample in samples:
            model = frozenset(item for item in sample.labels.items() if item[0] != label)
            models[model][sample.labels.get(label, "")] = sample.value
        complete = [blocks for blocks in models.values() if blocks.keys() >= {"tokens_per", "used", "max"}]
        if not complete:
            return None
        used, total = sum(blocks["used"] for blocks in complete), sum(blocks["max"] for blocks in complete)
        tokens = sum(blocks["max"] * blocks["tokens_per"] for blocks in complete)
        return cls(used / total if total else 0.0, int(tokens))
