"""`pb_utils.MetricFamily` and its metrics: a model's own entries in /metrics."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from neso.backends.python.errors import TritonModelException
from neso.backends.python.server_access import FamilyHandle, MetricHandle, current_access
from neso.server.errors import ServerError


class Metric:
    """One metric of a family. Made by `MetricFamily.Metric`, and of no use once that family is gone, as in Triton.

    Its methods raise `TritonModelException` then.
    """

    def __init__(self, family: MetricFamily, metric: MetricHandle) -> None:
        self._family = weakref.ref(family)
        self._held_by_family = weakref.ref(metric)

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. Raises `TritonModelException` for a counter that would sink."""
        with _told_to_the_model():
            self._metric().increment(value)

    def set(self, value: float) -> None:
        """Replace the value of a gauge. Raises `TritonModelException` for other kinds."""
        with _told_to_the_model():
            self._metric().set(value)

    def observe(self, value: float) -> None:
        """Count a value in a histogram. Raises `TritonModelException` for other kinds."""
        with _told_to_the_model():
            self._metric().observe(value)

    def value(self) -> float:
        """The value of a counter or a gauge. Raises `TritonModelException` for a histogram."""
        with _told_to_the_model():
            return self._metric().value()

    def _metric(self) -> MetricHandle:
        family, metric = self._family(), self._held_by_family()
        if family is None or metric is None:
            raise TritonModelException(
                "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. "
                "Keep the 'MetricFamily' for as long as its metrics are used."
            )
        return metric


class MetricFamily:
    """Metrics of one name, which stay in /metrics as long as this object lives.

    Families of one name and kind, of whatever model, are the same; a metric that two of them have made is there until
    both are gone.

    Raises `TritonModelException` for a name that is taken by another kind or by the server, or is no name.
    """

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    def __init__(self, name: str = "", description: str = "", kind: int = COUNTER) -> None:
        kinds = {self.COUNTER: "counter", self.GAUGE: "gauge", self.HISTOGRAM: "histogram"}
        if kind not in kinds:
            raise TritonModelException(f"unknown kind {kind!r} of metric family '{name}'")
        with _told_to_the_model():
            self._family: FamilyHandle = current_access().metric_family(name, description, kinds[kind])
        self._metrics: set[MetricHandle] = set()

    def Metric(
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """The family's metric with these labels; a histogram needs `buckets`, its increasing upper bounds.

        Raises `TritonModelException`.
        """
        with _told_to_the_model():
            metric = self._family.metric(labels, buckets)
        self._metrics.add(metric)
        return Metric(self, metric)


@contextmanager
def _told_to_the_model() -> Iterator[None]:
    try:
        yield
    except ServerError as error:
        raise TritonModelException(error.message) from None
