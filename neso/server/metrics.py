"""Prometheus metrics: the server's own, read from the statistics when scraped, and those of the backends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from neso.server.errors import AlreadyExists

if TYPE_CHECKING:
    from neso.server.model import Model

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Family = TypeVar("Family", Counter, Gauge, Histogram)


class MetricsRegistry(CollectorRegistry):
    """All metric families of a server."""

    def __init__(self) -> None:
        super().__init__(auto_describe=False)
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        self._watched: dict[tuple[str, tuple[str, ...]], Callable[[], float]] = {}

    def counter(self, name: str, help: str, labels: Sequence[str] = ("model", "version")) -> Counter:
        """A counter that several models may share: the first who asks makes it, the others get the same."""
        return self._share(Counter, name, labels, lambda: Counter(name, help, labels, registry=self))

    def gauge(self, name: str, help: str, labels: Sequence[str] = ("model", "version")) -> Gauge:
        """A gauge, shared like a `counter`."""
        return self._share(Gauge, name, labels, lambda: Gauge(name, help, labels, registry=self))

    def histogram(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = ("model", "version"),
        buckets: Sequence[float] = Histogram.DEFAULT_BUCKETS,
    ) -> Histogram:
        """A histogram, shared like a `counter`; the first who asks decides the buckets."""
        return self._share(
            Histogram, name, labels, lambda: Histogram(name, help, labels, buckets=buckets, registry=self)
        )

    def watch(
        self, name: str, help: str, model: str, version: str, read: Callable[[], float]
    ) -> Callable[[], None]:
        """Have a gauge call `read` when it is scraped; returns what ends that.

        When a model is replaced, the new one watches before the old one ends: the last who came counts.
        """
        family, labels = self.gauge(name, help), (model, version)
        family.labels(*labels).set_function(read)
        self._watched[name, labels] = read

        def unwatch() -> None:
            if self._watched.get((name, labels)) is read:
                del self._watched[name, labels]
                family.remove(*labels)

        return unwatch

    def taken(self, name: str) -> bool:
        """Whether a family of the server or of a backend has that name."""
        return name in self._families or any(name == family for family, *_ in _FAMILIES)

    def render(self) -> bytes:
        """The text exposition format, with the names that the families were given."""
        lines: list[str] = []
        for metric in self.collect():
            lines.extend(_render(metric))
        return "".join(lines).encode()

    def _share(
        self, kind: type[Family], name: str, labels: Sequence[str], make: Callable[[], Family]
    ) -> Family:
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = make()
        if not isinstance(found, kind) or found._labelnames != tuple(labels):
            raise AlreadyExists(f"metric '{name}' exists already with another kind or other labels")
        return found


class ModelCollector(Collector):
    """The `nv_*` families. Costs nothing until it is scraped."""

    def __init__(self, models: Callable[[], Iterable[Model]]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        for name, kind, documentation, read in _FAMILIES:
            metric = Metric(name, documentation, kind)
            for model in models:
                for extra, value in read(model):
                    metric.samples.append(Sample(name, {**model.metric_labels, **extra}, value))
            yield metric


Reader = Callable[["Model"], Iterable[tuple[Mapping[str, str], float]]]


def _one(read: Callable[[Model], float]) -> Reader:
    return lambda model: [({}, read(model))]


def _failures(model: Model) -> Iterator[tuple[Mapping[str, str], float]]:
    for reason, count in model.statistics.failures.items():
        yield {"reason": reason.value}, count


def _cache(read: Callable[[Model], float]) -> Reader:
    return lambda model: [({}, read(model))] if model.uses_cache else []


_FAMILIES: list[tuple[str, str, str, Reader]] = [
    (
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        _one(lambda model: model.statistics.success.count),
    ),
    (
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests, all batch sizes",
        _failures,
    ),
    (
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        _one(lambda model: model.statistics.inference_count),
    ),
    (
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        _one(lambda model: model.statistics.execution_count),
    ),
    (
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        _one(lambda model: model.statistics.success.ns // 1000),
    ),
    (
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        _one(lambda model: model.statistics.queue.ns // 1000),
    ),
    (
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        _one(lambda model: model.statistics.compute_input.ns // 1000),
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        _one(lambda model: model.statistics.compute_infer.ns // 1000),
    ),
    (
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        _one(lambda model: model.statistics.compute_output.ns // 1000),
    ),
    (
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        _one(lambda model: model.pending_count),
    ),
    (
        "nv_cache_num_hits_per_model",
        "counter",
        "Number of cache hits per model",
        _cache(lambda model: model.statistics.cache_hit.count),
    ),
    (
        "nv_cache_num_misses_per_model",
        "counter",
        "Number of cache misses per model",
        _cache(lambda model: model.statistics.cache_miss.count),
    ),
    (
        "nv_cache_hit_duration_per_model",
        "counter",
        "Total cache hit duration per model, in microseconds",
        _cache(lambda model: model.statistics.cache_hit.ns // 1000),
    ),
    (
        "nv_cache_miss_duration_per_model",
        "counter",
        "Total cache miss duration per model, in microseconds",
        _cache(lambda model: model.statistics.cache_miss.ns // 1000),
    ),
    (
        "nv_model_load_duration_secs",
        "gauge",
        "Model load time in seconds",
        _one(lambda model: model.load_duration),
    ),
]


def _render(metric: Metric) -> Iterator[str]:
    # prometheus_client's own writer puts `_total` on every counter; Triton's counters have no suffix.
    name = metric.name
    samples = [sample for sample in metric.samples if sample.name != f"{name}_created"]
    if metric.type == "counter" and any(sample.name == f"{name}_total" for sample in samples):
        name += "_total"
    yield f"# HELP {name} {_escape(metric.documentation)}\n"
    yield f"# TYPE {name} {metric.type}\n"
    for sample in samples:
        labels = ",".join(
            f'{key}="{_escape(value, quote=True)}"' for key, value in sorted(sample.labels.items())
        )
        braces = f"{{{labels}}}" if labels else ""
        whole = float(sample.value).is_integer()
        value = int(sample.value) if whole else floatToGoString(sample.value)  # type: ignore[no-untyped-call]
        yield f"{sample.name}{braces} {value}\n"


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
