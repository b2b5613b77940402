"""Metrics defined at run time by Python models and programs.

Families and metrics are rendered as long as they are referenced.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from weakref import WeakValueDictionary

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from neso.server.errors import AlreadyExists, InvalidArgument, Unsupported
from neso.server.metrics.latency import BucketCounts

Labels = tuple[tuple[str, str], ...]

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(str, Enum):
    """Metric kinds, with Prometheus' names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class CustomMetric:
    """A counter, gauge or histogram with fixed labels. Thread-safe.

    `buckets`: upper bounds of a histogram, without the infinite one.
    """

    def __init__(self, family: CustomFamily, labels: Labels, buckets: tuple[float, ...]) -> None:
        self.family = family  # keeps the family alive
        self.labels = labels
        self.buckets = buckets
        self._lock = threading.Lock()
        self._value = 0.0
        self._histogram = BucketCounts(buckets) if family.kind is MetricKind.HISTOGRAM else None

    def increment(self, value: float) -> None:
        """Add to a counter or gauge. Raises `InvalidArgument` for a negative counter, `Unsupported` for a histogram."""
        self._check("increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if value < 0 and self.family.kind is MetricKind.COUNTER:
            raise InvalidArgument("TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically")
        with self._lock:
            self._value += value

    def set(self, value: float) -> None:
        """Set a gauge. Raises `Unsupported` for other kinds."""
        self._check("set", MetricKind.GAUGE)
        with self._lock:
            self._value = float(value)

    def observe(self, value: float) -> None:
        """Observe a value in a histogram. Raises `Unsupported` for other kinds."""
        self._check("observe", MetricKind.HISTOGRAM)
        assert self._histogram is not None
        with self._lock:
            self._histogram.observe(value)

    def value(self) -> float:
        """Value of a counter or gauge. Raises `Unsupported` for a histogram."""
        self._check("value", MetricKind.COUNTER, MetricKind.GAUGE)
        with self._lock:
            return self._value

    def samples(self) -> list[Sample]:
        """Return samples of the text format."""
        name, labels = self.family.name, dict(self.labels)
        with self._lock:
            if self._histogram is None:
                return [Sample(name, labels, self._value)]
            return list(self._histogram.samples(name, labels))

    def _check(self, operation: str, *kinds: MetricKind) -> None:
        if self.family.kind not in kinds:
            raise Unsupported(
                f"TRITONSERVER_METRIC_KIND_{self.family.kind.name} does not support {operation.capitalize()}"
            )


class CustomFamily:
    """Metrics with the same name and kind, one per set of labels."""

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self._lock = threading.Lock()
        self._metrics: WeakValueDictionary[Labels, CustomMetric] = WeakValueDictionary()

    def metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> CustomMetric:
        """Return the metric with these labels, created by the first call.

        Raises `InvalidArgument` for invalid labels or buckets, `AlreadyExists` if it has other buckets.
        """
        bounds = self._check_buckets(buckets)
        key = self._check_labels(labels or {})
        with self._lock:
            found = self._metrics.get(key)
            if found is None:
                found = self._metrics[key] = CustomMetric(self, key, bounds)
        if found.buckets != bounds:
            raise AlreadyExists(f"metric '{self.name}' exists already with other buckets")
        return found

    def collect(self) -> Metric | None:
        """Return all referenced metrics; None if there are none."""
        with self._lock:
            metrics = list(self._metrics.values())
        if not metrics:
            return None
        result = Metric(self.name, self.description, self.kind.value)
        for metric in metrics:
            result.samples.extend(metric.samples())
        return result

    def _check_buckets(self, buckets: Sequence[float] | None) -> tuple[float, ...]:
        if self.kind is not MetricKind.HISTOGRAM:
            if buckets is not None:
                raise InvalidArgument(f"Unexpected buckets found for {self.kind.value} '{self.name}'")
            return ()
        if buckets is None:
            raise InvalidArgument(f"Must provide buckets for histogram metric '{self.name}'")
        return BucketCounts.check_bounds(self.name, buckets)

    def _check_labels(self, labels: Mapping[str, str]) -> Labels:
        if not isinstance(labels, Mapping):
            raise InvalidArgument(f"labels of metric '{self.name}' must be a dictionary")
        for name, value in labels.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InvalidArgument(f"labels of metric '{self.name}' must be text, got {name!r}: {value!r}")
            if not _LABEL.fullmatch(name) or (name == "le" and self.kind is MetricKind.HISTOGRAM):
                raise InvalidArgument(f"invalid label name '{name}' for metric '{self.name}'")
        return tuple(sorted(labels.items()))


class CustomMetrics(Collector):
    """Custom families of a server. Thread-safe.

    `is_registered`: whether a name is used by a built-in family of the server.
    """

    def __init__(self, is_registered: Callable[[str], bool]) -> None:
        self._is_registered = is_registered
        self._lock = threading.Lock()
        self._families: WeakValueDictionary[str, CustomFamily] = WeakValueDictionary()

    def family(self, name: str, description: str, kind: MetricKind) -> CustomFamily:
        """Return the family with this name, created by the first call.

        Raises `InvalidArgument` for an invalid name, `AlreadyExists` if the family has another kind.
        """
        if not _NAME.fullmatch(name):
            raise InvalidArgument(f"invalid metric name '{name}'")
        if self._is_registered(name):
            raise AlreadyExists(f"metric '{name}' is one of the server's own")
        with self._lock:
            found = self._families.get(name)
            if found is None:
                found = self._families[name] = CustomFamily(name, description, kind)
        if found.kind is not kind:
            raise AlreadyExists(
                f"metric family '{name}' already exists with kind '{found.kind.value}', not '{kind.value}'"
            )
        return found

    def samples(self, name: str) -> list[Sample]:
        """Return the samples of one family; empty if it does not exist."""
        family = self._families.get(name)
        metric = family.collect() if family is not None else None
        return metric.samples if metric is not None else []

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            families = list(self._families.values())
        for family in families:
            metric = family.collect()
            if metric is not None:
                yield metric
