"""All metric families of a server: those that it reads when scraped, and those that backends make."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.samples import Sample

from neso.server.errors import AlreadyExists
from neso.server.metrics.description import FamilyDescription
from neso.server.metrics.model_families import MODEL_FAMILIES
from neso.server.metrics.read_counter import ReadCounter
from neso.server.metrics.text import metric_lines

_LINES_A_TURN = 500  # some 2 ms of work

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

    def _read_counter(self, name: str, help: str, labels: Sequence[str]) -> Gauge:
        return self._share(ReadCounter, name, labels, lambda: ReadCounter(name, help, labels, registry=self))

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
        self, name: str, help: str, model: str, version: str, read: Callable[[], float], **further: str
    ) -> Callable[[], None]:
        """Have a gauge, or a counter if its name ends in "_total", call `read` when it is scraped.

        Returns what ends that. `further` are labels.

        When a model is replaced, the new one watches before the old one ends: the last who came counts.
        """
        family_labels = ("model", "version", *further)
        counts = name.endswith("_total")
        family = (
            self._read_counter(name, help, family_labels) if counts else self.gauge(name, help, family_labels)
        )
        labels = (model, version, *further.values())
        family.labels(*labels).set_function(read)
        self._watched[name, labels] = read

        def unwatch() -> None:
            if self._watched.get((name, labels)) is read:
                del self._watched[name, labels]
                family.remove(*labels)

        return unwatch

    def taken(self, name: str) -> bool:
        """Whether a family of the server or of a backend has that name."""
        return name in self._families or name in MODEL_FAMILIES

    def describe(self) -> list[FamilyDescription]:
        """The families that backends have made, in their order."""
        return [
            FamilyDescription(
                f"{metric.name}_total" if metric.type == "counter" else metric.name,
                metric.type,
                metric.documentation,
                family._labelnames,
            )
            for family in self._families.values()
            for metric in family.describe()
        ]

    def samples(self, name: str) -> list[Sample]:
        """Those of one family of a backend."""
        family = self._families.get(name)
        return [sample for metric in family.collect() for sample in metric.samples] if family else []

    def render(self) -> bytes:
        """The text exposition format, with the names that the families were given."""
        return "".join(self._lines()).encode()

    async def render_in_turns(self) -> bytes:
        """What `render` gives; the event loop sees to others on the way, however much there is to write."""
        lines: list[str] = []
        for line in self._lines():
            lines.append(line)
            if len(lines) % _LINES_A_TURN == 0:
                await asyncio.sleep(0)
        return "".join(lines).encode()

    def _lines(self) -> Iterator[str]:
        for metric in self.collect():
            yield from metric_lines(metric)

    def _share(
        self, kind: type[Family], name: str, labels: Sequence[str], make: Callable[[], Family]
    ) -> Family:
        found = self._families.get(name)
        if found is None:
            found = self._families[name] = make()
        if not isinstance(found, kind) or found._labelnames != tuple(labels):
            raise AlreadyExists(f"metric '{name}' exists already with another kind or other labels")
        return found
