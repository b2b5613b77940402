"""The `nv_*` families of models, by Triton's names. They cost nothing until they are scraped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from neso.server.metrics.config import MetricsConfig
from neso.server.metrics.description import FamilyDescription
from neso.server.metrics.latency_summary import LatencySummary
from neso.server.metrics.model_latencies import FIRST_RESPONSE_FAMILY, ModelLatencies

if TYPE_CHECKING:
    from neso.server.model import Model


class _Family(NamedTuple):
    name: str
    kind: str
    help: str
    samples: Callable[[Model, str], Iterable[Sample]]
    labels: tuple[str, ...] = ("model", "version")


def _one(name: str, kind: str, help: str, read: Callable[[Model], float]) -> _Family:
    return _Family(name, kind, help, lambda model, name: (Sample(name, model.metric_labels, read(model)),))


def _of_cache(name: str, help: str, read: Callable[[Model], float]) -> _Family:
    def samples(model: Model, name: str) -> Iterable[Sample]:
        return (Sample(name, model.metric_labels, read(model)),) if model.uses_cache else ()

    return _Family(name, "counter", help, samples)


def _summary(
    name: str, help: str, read: Callable[[ModelLatencies], LatencySummary], cached: bool | None = None
) -> _Family:
    """`cached`: of the models that use the response cache only, or of the others."""

    def samples(model: Model, name: str) -> Iterator[Sample]:
        latencies = model.statistics.latencies
        if latencies is None or (cached is not None and model.uses_cache is not cached):
            return
        summary, labels = read(latencies), model.metric_labels
        yield Sample(f"{name}_count", labels, summary.count)
        yield Sample(f"{name}_sum", labels, summary.ns // 1000)
        fractions = tuple(quantile.value for quantile in latencies.quantiles)
        values = summary.quantiles(fractions, time.monotonic_ns())
        for quantile, ns in zip(latencies.quantiles, values, strict=True):
            yield Sample(name, {**labels, "quantile": quantile.text}, ns / 1000)

    return _Family(name, "summary", help, samples)


def _failures(model: Model, name: str) -> Iterator[Sample]:
    for reason, count in model.statistics.failures.items():
        yield Sample(name, {**model.metric_labels, "reason": reason.value}, count)


def _first_response(model: Model, name: str) -> Iterable[Sample]:
    histogram = model.statistics.responses.first_response_ms
    return histogram.samples(name, model.metric_labels) if histogram is not None else ()


_COUNTS = (
    _one(
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        lambda model: model.statistics.success.count,
    ),
    _Family(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests, all batch sizes",
        _failures,
        ("model", "reason", "version"),
    ),
    _one(
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        lambda model: model.statistics.inference_count,
    ),
    _one(
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        lambda model: model.statistics.execution_count,
    ),
    _one(
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        lambda model: model.pending_count,
    ),
    _one(
        "nv_model_load_duration_secs",
        "gauge",
        "Model load time in seconds",
        lambda model: model.load_duration,
    ),
)

_COUNTER_LATENCIES = (
    _one(
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda model: model.statistics.success.ns // 1000,
    ),
    _one(
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda model: model.statistics.queue.ns // 1000,
    ),
    _one(
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda model: model.statistics.compute_input.ns // 1000,
    ),
    _one(
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda model: model.statistics.compute_infer.ns // 1000,
    ),
    _one(
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda model: model.statistics.compute_output.ns // 1000,
    ),
    _of_cache(
        "nv_cache_num_hits_per_model",
        "Number of cache hits per model",
        lambda model: model.statistics.cache_hit.count,
    ),
    _of_cache(
        "nv_cache_num_misses_per_model",
        "Number of cache misses per model",
        lambda model: model.statistics.cache_miss.count,
    ),
    _of_cache(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda model: model.statistics.cache_hit.ns // 1000,
    ),
    _of_cache(
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda model: model.statistics.cache_miss.ns // 1000,
    ),
)

_HISTOGRAM_LATENCIES = (
    _Family(
        FIRST_RESPONSE_FAMILY,
        "histogram",
        "Duration from request to first response in milliseconds",
        _first_response,
    ),
)

_SUMMARY_LATENCIES = (
    # Of cached models, that of whole requests would mix two kinds of requests; Triton leaves it out as well.
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
    family.name for family in _COUNTS + _COUNTER_LATENCIES + _HISTOGRAM_LATENCIES + _SUMMARY_LATENCIES
)


class ModelCollector(Collector):
    """The families that the configuration asks for, of all `models`."""

    def __init__(self, models: Callable[[], Iterable[Model]], config: MetricsConfig) -> None:
        self._models = models
        self._families = _families(config)

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            # Made while they are written: of a thousand models, all at once would keep the loop from others.
            metric.samples = _samples(family, models)  # type: ignore[assignment]
            yield metric


def describe_model_families(config: MetricsConfig) -> list[FamilyDescription]:
    """The families that the configuration asks for. Models add the labels of their `metric_tags`."""
    return [
        FamilyDescription(family.name, family.kind, family.help, family.labels)
        for family in _families(config)
    ]


def _families(config: MetricsConfig) -> list[_Family]:
    families = list(_COUNTS)
    if config.counter_latencies:
        families.extend(_COUNTER_LATENCIES)
    if config.histogram_latencies:
        families.extend(_HISTOGRAM_LATENCIES)
    if config.summary_latencies:
        families.extend(_SUMMARY_LATENCIES)
    return families


def _samples(family: _Family, models: list[Model]) -> Iterator[Sample]:
    for model in models:
        yield from family.samples(model, family.name)
