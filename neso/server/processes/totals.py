"""Statistics and metrics of the front-end processes, which the main process adds to its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from neso.server.metrics.registry import SampleKey
from neso.server.statistics import ModelStatistics


@dataclass(slots=True)
class ProcessTotals:
    """What a process has counted since its start.

    - models: statistics and number of pending requests of its models, by key
    - samples: values of its counters and histograms
    """

    models: dict[int, tuple[ModelStatistics, int]] = field(default_factory=dict)
    samples: dict[SampleKey, float] = field(default_factory=dict)


class Totals:
    """Sums over all front-end processes, including those that have ended."""

    def __init__(self) -> None:
        self._ended = ProcessTotals()
        self.models: dict[int, tuple[ModelStatistics, int]] = {}
        self.samples: dict[SampleKey, float] = {}

    def add_ended(self, totals: ProcessTotals) -> None:
        """Keep the counts of a process that has ended."""
        models = {key: (statistics, 0) for key, (statistics, _) in totals.models.items()}
        self._ended = _sum((self._ended, ProcessTotals(models, totals.samples)))

    def update(self, running: Iterable[ProcessTotals]) -> None:
        """Compute the sums with the current totals of the running processes."""
        total = _sum((self._ended, *running))
        self.models, self.samples = total.models, total.samples

    def forget(self, loaded: set[int]) -> None:
        """Drop the statistics of models that are not loaded any more."""
        self._ended.models = {key: value for key, value in self._ended.models.items() if key in loaded}


def _sum(parts: Iterable[ProcessTotals]) -> ProcessTotals:
    models: dict[int, tuple[ModelStatistics, int]] = {}
    samples: Counter[SampleKey] = Counter()
    for part in parts:
        for key, (statistics, pending) in part.models.items():
            if key in models:
                before, waiting = models[key]
                models[key] = before.merged(statistics), waiting + pending
            else:
                models[key] = statistics, pending
        samples.update(part.samples)
    return ProcessTotals(models, dict(samples))
