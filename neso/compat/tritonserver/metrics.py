"""Metrics of the program's own, shown by all servers of the process."""

from __future__ import annotations

from neso.compat.tritonserver.enums import MetricKind
from neso.server.metrics.custom import CustomMetrics
from neso.server.metrics.custom import MetricKind as NesoKind

# Triton's families belong to the process, not to a server.
process_metrics = CustomMetrics(lambda name: name.startswith("nv_"))


class MetricFamily:
    """Metrics of one name and kind. Raises `InvalidArgumentError`, `AlreadyExistsError` for another kind."""

    def __init__(self, kind: MetricKind, name: str, description: str) -> None:
        self.kind = kind
        self.neso = process_metrics.family(name, description, NesoKind[kind.name])


class Metric:
    """One metric of a family, with labels of its own; shown while somebody holds it.

    A histogram needs the upper bounds of its `buckets`.
    """

    def __init__(
        self, family: MetricFamily, labels: dict[str, str] | None = None, buckets: list[float] | None = None
    ) -> None:
        self._kind = family.kind
        self._metric = family.neso.metric(labels, buckets)

    @property
    def kind(self) -> MetricKind:
        return self._kind

    @property
    def value(self) -> float:
        """Of a counter or a gauge. Raises `UnsupportedError` for a histogram."""
        return self._metric.value()

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. Raises `InvalidArgumentError`, `UnsupportedError` for a histogram."""
        self._metric.increment(value)

    def set_value(self, value: float) -> None:
        """Set a gauge. Raises `UnsupportedError` for the others."""
        self._metric.set(value)

    def observe(self, value: float) -> None:
        """Count a value in a histogram. Raises `UnsupportedError` for the others."""
        self._metric.observe(value)
