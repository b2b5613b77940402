"""Trials of `neso perf analyze` and `tune`: the goal of a search, and reuse of earlier runs."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neso.perf.client.generator import ENDS_SWEEP
from neso.perf.errors import PerfError
from neso.perf.exports.run_folder import RUN, load_run, save_run
from neso.perf.measurement import Measurement
from neso.perf.metrics import Slo, metric_named
from neso.perf.records import RunResult
from neso.perf.statistics import PERCENTILES


@dataclass(frozen=True)
class Goal:
    """A statistic of a metric to improve, while enough requests meet the objectives."""

    metric: str
    statistic: str
    larger_is_better: bool
    slos: tuple[Slo, ...] = ()
    min_good_share: float = 95.0

    @property
    def text(self) -> str:
        """Description of the goal."""
        name = metric_named(self.metric).title
        text = f"{name} ({self.statistic})" if self.statistic != "avg" else name
        if not self.slos:
            return text
        limits = ", ".join(f"{slo.metric} {'≥' if slo.at_least else '≤'} {slo.limit:g}" for slo in self.slos)
        return f"{text}, with {self.min_good_share:g} % of requests in {limits}"

    def value(self, run: Measurement) -> float:
        """Return the value of a run; NaN if it has none."""
        summary = run.summaries.get(self.metric)
        return math.nan if summary is None else summary.get(self.statistic)

    def is_met(self, run: Measurement) -> bool:
        """Whether enough requests meet the objectives. Failed requests do not."""
        if not self.slos:
            return len(run) > 0
        share = run.summaries.get("good_request_share")
        return share is not None and share.avg >= self.min_good_share

    def rank(self, run: Measurement) -> tuple[bool, float]:
        """Return a key for which better runs are larger."""
        value = self.value(run)
        if math.isnan(value):
            return (False, -math.inf)
        return (self.is_met(run), value if self.larger_is_better else -value)


def parse_goal(text: str, slos: tuple[Slo, ...], min_good_share: float, streaming: bool) -> Goal:
    """Parse METRIC or METRIC:STATISTIC; "" is the default goal. Raises `PerfError`."""
    if not text:
        text = "goodput" if slos else "output_token_throughput" if streaming else "request_throughput"
    name, _, statistic = text.partition(":")
    metric = metric_named(name)
    if metric.name == "goodput" and not slos:
        raise PerfError("--objective goodput needs --goodput with the objectives")
    allowed = ("avg",) if metric.of_run else ("avg", "min", "max", *(f"p{share}" for share in PERCENTILES))
    statistic = statistic or ("avg" if metric.of_run else "p50")
    if statistic not in allowed:
        raise PerfError(f"--objective {text}: expected one of {', '.join(allowed)} after {name}:")
    return Goal(metric.name, statistic, metric.larger_is_better, slos, min_good_share)


def trial_folder(parent: Path, name: str, settings: Any) -> Path:
    """Return the folder of a trial; another folder for each set of settings."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:10]
    return parent / f"{name}-{digest}"


def run_once(folder: Path, measure: Callable[[], RunResult], *, fresh: bool) -> RunResult:
    """Return the run in the folder of an earlier search, or else measure it and save it there.

    A run that was interrupted is not saved.
    """
    if not fresh and (folder / RUN).is_file():
        return load_run(folder)
    run = measure()
    if run.stop_reason not in ENDS_SWEEP:
        folder.mkdir(parents=True, exist_ok=True)
        save_run(run, folder)
    return run


def best_of(goal: Goal, runs: Sequence[Measurement]) -> Measurement | None:
    """Return the best run that meets the objectives; None if none does."""
    met = [run for run in runs if goal.rank(run)[0]]
    return max(met, key=goal.rank) if met else None
