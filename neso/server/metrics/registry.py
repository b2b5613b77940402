"""Metric family declarations, their registry, and the text exposition format.

A metric is declared once, as a `Family`. Its values come from

- a counter or histogram of prometheus-client: `MetricsRegistry.counter`, `histogram`
- a function that is called at each scrape: `MetricsRegistry.watch`
- a `Collector` that reads existing state at each scrape, such as `ModelCollector`

A backend uses `ModelMetrics`, which adds the labels of its model.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from neso.server.errors import AlreadyExists

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_MODEL_LABELS = ("model", "version")
_LAST_LABELS = ("le", "quantile")
_LINES_PER_TURN = 500  # about 2 ms of work

Kind = TypeVar("Kind", bound=Collector)

SampleKey = tuple[str, tuple[tuple[str, str], ...]]
"""Name and sorted labels of a sample."""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family, as rendered by /metrics.

    `kind`: counter, gauge, histogram or summary. `labels`: the labels of all samples, without `le` and `quantile`.
    `buckets`: upper bounds of a histogram, without the infinite one.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = _MODEL_LABELS
    buckets: tuple[float, ...] = ()


class LabelSet(dict[str, str]):
    """Constant labels; their text is formatted once."""

    __slots__ = ("text",)

    def __init__(self, labels: Mapping[str, str]) -> None:
        super().__init__(labels)
        self.text = _format_labels(labels)


class _WatchedFamily(Collector):
    """A gauge or counter whose values are read at each scrape; read functions by label values."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._reads: dict[tuple[str, ...], tuple[LabelSet, Callable[[], float]]] = {}

    def add(self, values: tuple[str, ...], read: Callable[[], float]) -> None:
        self._reads[values] = (LabelSet(dict(zip(self._family.labels, values, strict=True))), read)

    def remove(self, values: tuple[str, ...], read: Callable[[], float]) -> None:
        """Remove the function, unless another function has replaced it."""
        if values in self._reads and self._reads[values][1] is read:
            del self._reads[values]

    def collect(self) -> Iterator[Metric]:
        name = self._family.name
        metric = Metric(name, self._family.help, self._family.kind)
        metric.samples = [Sample(name, labels, float(read())) for labels, read in list(self._reads.values())]
        yield metric


class MetricsRegistry(CollectorRegistry):
    """All metric families of a server.

    - reserved: family names provided by collectors
    - namespaced: whether models of several repositories can have the same name
    """

    def __init__(self, reserved: Collection[str] = (), *, namespaced: bool = False) -> None:
        super().__init__(auto_describe=False)
        self._reserved = reserved
        self.namespaced = namespaced
        self._families: dict[str, tuple[Family, Collector]] = {}
        self.elsewhere: Mapping[SampleKey, float] = {}
        """Samples of counters and histograms of front-end processes, which are added at each scrape."""
        self._on_workers: defaultdict[SampleKey, float] = defaultdict(float)

    def add(self, samples: Iterable[tuple[SampleKey, float]]) -> None:
        """Add what a worker of a stage has counted since its last message."""
        for key, value in samples:
            self._on_workers[key] += value

    def in_other_processes(self) -> dict[SampleKey, float]:
        """Return the samples of counters and histograms of front-end processes and workers."""
        total = dict(self.elsewhere)
        for key, value in self._on_workers.items():
            total[key] = total.get(key, 0.0) + value
        return total

    def counter(self, family: Family) -> Counter:
        """Return the counter of a family, which the models share. The first call creates it. Raises `AlreadyExists`."""
        return self._shared(
            family, Counter, lambda: Counter(family.name, family.help, family.labels, registry=self)
        )

    def histogram(self, family: Family) -> Histogram:
        """Return the histogram of a family, shared like a `counter`; the first declaration sets the buckets."""
        return self._shared(
            family,
            Histogram,
            lambda: Histogram(family.name, family.help, family.labels, buckets=family.buckets, registry=self),
        )

    def watch(self, family: Family, values: tuple[str, ...], read: Callable[[], float]) -> Callable[[], None]:
        """Call `read` at each scrape for the value of a gauge or counter with the label values `values`.

        Returns a function that stops watching. A later `watch` with the same labels replaces this one: when a model is
        reloaded, the new model calls `watch` before the old one stops. Raises `AlreadyExists`.
        """

        def make() -> _WatchedFamily:
            watched = _WatchedFamily(family)
            self.register(watched)
            return watched

        watched = self._shared(family, _WatchedFamily, make)
        watched.add(values, read)
        return lambda: watched.remove(values, read)

    def is_registered(self, name: str) -> bool:
        """Return whether the name is used by a family of the server or of a backend."""
        return name in self._families or f"{name}_total" in self._families or name in self._reserved

    def describe(self) -> list[Family]:
        """Return the families of backends, in order of registration."""
        return [family for family, _ in self._families.values()]

    def samples(self, name: str) -> list[Sample]:
        """Return the samples of one family of a backend."""
        if name not in self._families:
            return []
        return [sample for metric in self._families[name][1].collect() for sample in metric.samples]

    def counts(self) -> dict[SampleKey, float]:
        """Return the samples of the counters and histograms of backends."""
        return {
            sample_key(sample): sample.value
            for _, collector in self._families.values()
            if isinstance(collector, Counter | Histogram)
            for metric in collector.collect()
            for sample in metric.samples
            if not sample.name.endswith("_created")
        }

    def render(self) -> bytes:
        """Return all metrics in the text exposition format."""
        return "".join(self._lines()).encode()

    async def render_in_turns(self) -> bytes:
        """Like `render`, without blocking the event loop when there are many metrics."""
        lines: list[str] = []
        for line in self._lines():
            lines.append(line)
            if len(lines) % _LINES_PER_TURN == 0:
                await asyncio.sleep(0)
        return "".join(lines).encode()

    def _lines(self) -> Iterator[str]:
        rest = self.in_other_processes()
        for metric in self.collect():
            if rest and metric.type in ("counter", "histogram"):
                _add(metric, rest)
            yield from metric_lines(metric)

    def _shared(self, family: Family, kind: type[Kind], make: Callable[[], Kind]) -> Kind:
        name = family.name
        if name not in self._families:
            self._families[name] = (family, make())
        known, collector = self._families[name]
        if not isinstance(collector, kind) or known.labels != family.labels:
            raise AlreadyExists(f"metric '{name}' exists already with another kind or other labels")
        return collector


class ModelMetrics:
    """Metrics of one model, in the families that it shares with others.

    The first labels of each family must be `model` and `version`. If models have namespaces, `namespace` is the third.
    """

    def __init__(self, registry: MetricsRegistry, model: str, version: str, namespace: str = "") -> None:
        self._registry = registry
        self._values = (model, version, namespace) if registry.namespaced else (model, version)

    def counter(self, family: Family, *labels: str) -> Counter:
        """Return the model's counter; `labels`: values of the other labels."""
        return self._registry.counter(self._family(family)).labels(*self._values, *labels)

    def histogram(self, family: Family, *labels: str) -> Histogram:
        """Return the model's histogram; `labels`: values of the other labels."""
        return self._registry.histogram(self._family(family)).labels(*self._values, *labels)

    def watch(self, family: Family, read: Callable[[], float], *labels: str) -> Callable[[], None]:
        """See `MetricsRegistry.watch`."""
        return self._registry.watch(self._family(family), (*self._values, *labels), read)

    def _family(self, family: Family) -> Family:
        assert family.labels[:2] == _MODEL_LABELS
        if not self._registry.namespaced:
            return family
        return replace(family, labels=(*_MODEL_LABELS, "namespace", *family.labels[2:]))


def sample_key(sample: Sample) -> SampleKey:
    """Return name and labels of a sample."""
    return sample.name, tuple(sorted(sample.labels.items()))


def _add(metric: Metric, rest: dict[SampleKey, float]) -> None:
    """Add the values of other processes to the samples of a family, and their samples with other labels."""
    samples = [
        sample._replace(value=sample.value + rest.pop(sample_key(sample), 0.0)) for sample in metric.samples
    ]
    names = {f"{metric.name}{suffix}" for suffix in ("", "_total", "_count", "_sum", "_bucket")}
    for key in [key for key in rest if key[0] in names]:
        samples.append(Sample(key[0], dict(key[1]), rest.pop(key)))
    metric.samples = samples


def metric_lines(metric: Metric) -> Iterator[str]:
    """Yield the text of a family, about one line at a time; nothing for a family without samples.

    The writer of prometheus-client appends `_total` to every counter; Triton's counters have no suffix.
    """
    name, total, created = metric.name, f"{metric.name}_total", f"{metric.name}_created"
    has_header = False
    for sample in metric.samples:
        if sample.name == created:
            continue
        if not has_header:
            has_header = True
            if sample.name == total:
                name = total
            yield f"# HELP {name} {_escape(metric.documentation)}\n# TYPE {name} {metric.type}\n"
        labels = sample.labels
        if "le" in labels:
            # prometheus-client writes "10.0", Triton "10".
            labels = {**labels, "le": format_number(float(labels["le"]))}
        text = labels.text if isinstance(labels, LabelSet) else _format_labels(labels)
        yield f"{sample.name}{text} {format_number(sample.value)}\n"


def format_number(value: float) -> str:
    """Format a value; whole numbers have no decimal point."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value)):
        return str(int(value))
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _format_labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    names = sorted(labels, key=lambda name: (name in _LAST_LABELS, name))
    return "{" + ",".join(f'{name}="{_escape(labels[name], quote=True)}"' for name in names) + "}"


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
