"""`neso perf analyze`: find the best load, or compare values of another parameter."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from neso.perf.client.generator import ENDS_SWEEP, LoadGenerator
from neso.perf.console import WIDTH, load_text, number, print_sweep
from neso.perf.endpoints.options import EndpointOptions
from neso.perf.errors import PerfError
from neso.perf.exports.run_folder import folder_name
from neso.perf.inputs.options import InputOptions
from neso.perf.load.options import LoadOptions
from neso.perf.measurement import Measurement
from neso.perf.metrics import parse_slos
from neso.perf.output_options import OutputOptions
from neso.perf.profile import open_generator, run_load
from neso.perf.records import RunResult
from neso.perf.report.html import write_report
from neso.perf.search_options import AnalyzeOptions
from neso.perf.trials import Goal, best_of, parse_goal, run_once, trial_folder

_SATURATED = 1.05
"""Throughput counts as saturated if doubling the load improves the goal by a smaller factor."""
_BISECTIONS = 3
_INPUT_FIELDS = {
    "input_sequence_length": "input_tokens_mean",
    "output_sequence_length": "output_tokens_mean",
    "batch_size": "batch_size_text",
    "passages": "rankings_passages_mean",
    "num_dataset_entries": "num_entries",
}


@dataclass(frozen=True)
class Analysis:
    """All runs in the order of their load, and the best one, or None if no run meets the objectives."""

    goal: Goal
    runs: list[Measurement]
    best: Measurement | None


def analyze(
    endpoint: EndpointOptions,
    load: LoadOptions,
    inputs: InputOptions,
    output: OutputOptions,
    options: AnalyzeOptions,
) -> Analysis:
    """Measure the values of the sweep, or search for the best load.

    Runs of an earlier analysis with the same options in the artifact folder are used again. Raises `PerfError`.
    """
    slos = parse_slos(output.goodput)
    goal = parse_goal(options.objective, slos, options.min_good_share, endpoint.streaming)
    values = sweep_values(options)
    if values is None and options.sweep_type not in ("concurrency", "request_rate"):
        raise PerfError(f"--sweep-type {options.sweep_type} needs --sweep-list or --sweep-range")
    runs: list[Measurement] = []
    with _Points(endpoint, load, inputs, output, options) as points:

        def measure(value: float) -> Measurement:
            result = points.run(value)
            runs.append(Measurement(result, slos=slos))
            if result.stop_reason in ENDS_SWEEP:
                raise _Stopped
            return runs[-1]

        with suppress(_Stopped):
            if values is None:
                search_load(measure, goal, options.max_load)
            else:
                for value in values:
                    measure(value)
    runs.sort(key=lambda run: run.result.load[options.sweep_type])
    return Analysis(goal, runs, best_of(goal, runs))


class _Stopped(Exception):
    """A run ended early, by Ctrl-C or because the server is gone."""


class _Points:
    """Runs at values of the sweep. Values of the load share the workers; values of other parameters need new ones."""

    def __init__(
        self,
        endpoint: EndpointOptions,
        load: LoadOptions,
        inputs: InputOptions,
        output: OutputOptions,
        options: AnalyzeOptions,
    ) -> None:
        self._endpoint, self._load, self._inputs, self._output = endpoint, load, inputs, output
        self._options = options
        self._open = ExitStack()
        self._generator: LoadGenerator | None = None
        self._parent = output.artifact_dir / f"analyze-{options.sweep_type}"

    def __enter__(self) -> _Points:
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def run(self, value: float) -> RunResult:
        """Return the run at a value, measured now or by an earlier analysis."""
        kind = self._options.sweep_type
        amount = value if kind == "request_rate" else int(value)
        load, inputs = _varied(kind, amount, self._load, self._inputs)
        label = {kind: amount} if kind in _INPUT_FIELDS else {}
        settings = [str(one) for one in (self._endpoint, load, inputs)]

        def measure() -> RunResult:
            if self._generator is None or label:
                self._open.close()
                opened = open_generator(self._endpoint, load, inputs, self._output)
                self._generator = self._open.enter_context(opened)
            plan, warm_up = next(load.loads())
            return run_load(self._generator, plan, warm_up, inputs, self._output, label)

        folder = trial_folder(self._parent, f"{kind}{amount}", settings)
        return run_once(folder, measure, fresh=self._options.fresh)


def search_load(measure: Callable[[float], Measurement], goal: Goal, largest: int) -> None:
    """Double the load from 1 until the objectives fail or the goal stops growing, then bisect around the best."""
    tried: dict[int, Measurement] = {}

    def at(value: int) -> Measurement:
        if value not in tried:
            tried[value] = measure(float(value))
        return tried[value]

    value, flat = 1, 0
    at(value)
    while value * 2 <= largest and flat < 2:
        before, run = at(value), at(value * 2)
        value *= 2
        if goal.is_met(before) and not goal.is_met(run):
            break
        grown = goal.rank(run)[1] - goal.rank(before)[1] > (_SATURATED - 1) * abs(goal.value(before))
        flat = 0 if grown else flat + 1
    for _ in range(_BISECTIONS):
        best = max(tried, key=lambda one: goal.rank(tried[one]))
        ordered = sorted(tried)
        place = ordered.index(best)
        sides = [ordered[i] for i in (place - 1, place + 1) if 0 <= i < len(ordered)]
        middles = [(best + side) // 2 for side in sides if abs(side - best) > 1]
        if not middles:
            return
        for middle in middles:
            at(middle)


def sweep_values(options: AnalyzeOptions) -> list[float] | None:
    """Return the values of `--sweep-list` or `--sweep-range`; None if neither is given. Raises `PerfError`."""
    if options.sweep_list and options.sweep_range:
        raise PerfError("--sweep-list and --sweep-range cannot be combined")
    try:
        if options.sweep_list:
            values = [float(part) for part in options.sweep_list.split(",")]
        elif options.sweep_range:
            values = _range([float(part) for part in options.sweep_range.split(":")])
        else:
            return None
    except ValueError:
        given = options.sweep_list or options.sweep_range
        raise PerfError(f"expected --sweep-list 1,2,4 or --sweep-range 1:8 or 1:8:1, got '{given}'") from None
    if min(values) <= 0:
        raise PerfError(f"values of a sweep must be positive, got {min(values):g}")
    if options.sweep_type != "request_rate" and any(not value.is_integer() for value in values):
        raise PerfError(f"values of {options.sweep_type} must be integers")
    return values


def _range(parts: list[float]) -> list[float]:
    if (
        not 2 <= len(parts) <= 3
        or parts[0] <= 0
        or parts[1] < parts[0]
        or (len(parts) == 3 and parts[2] <= 0)
    ):
        raise ValueError
    values = [parts[0]]
    while (following := values[-1] + parts[2] if len(parts) == 3 else values[-1] * 2) <= parts[1]:
        values.append(following)
    return values


def _varied(
    kind: str, value: float, load: LoadOptions, inputs: InputOptions
) -> tuple[LoadOptions, InputOptions]:
    if kind == "concurrency":
        return replace(load, concurrency=(int(value),)), inputs
    if kind == "request_rate":
        return replace(load, request_rate=(value,)), inputs
    changes: dict[str, Any] = {_INPUT_FIELDS[kind]: value}
    return load, replace(inputs, **changes)


def write_analysis(analysis: Analysis, output: OutputOptions) -> Path:
    """Write analyze.json, analyze_export_genai_perf.csv and the report of the sweep; returns the report."""
    folder, goal, runs = output.artifact_dir, analysis.goal, analysis.runs
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "load": run.result.load,
            "meets_objectives": goal.is_met(run),
            "objective": goal.value(run),
            **{name: summary.avg for name, summary in run.summaries.items()},
        }
        for run in runs
    ]
    best = None if analysis.best is None else analysis.best.result.load
    content = {"goal": goal.text, "best": best, "runs": rows}
    (folder / "analyze.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    names = list(dict.fromkeys(name for row in rows for name in row))
    with (folder / "analyze_export_genai_perf.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["Config Name", *names])
        writer.writeheader()
        for run, row in zip(runs, rows, strict=True):
            writer.writerow(
                {"Config Name": folder_name(run.result), **row, "load": load_text(run.result.load)}
            )
    return write_report(runs, folder / "analyze_report.html")


def print_analysis(analysis: Analysis) -> None:
    """Print the runs and the best of them."""
    console = Console(width=WIDTH)
    print_sweep(analysis.runs, console)
    console.print(f"Goal: {analysis.goal.text}", markup=False)
    if analysis.best is None:
        console.print("No run meets the objectives.", style="yellow")
    else:
        value = number(analysis.goal.value(analysis.best))
        console.print(f"Best: {load_text(analysis.best.result.load)}, {value}", style="bold", markup=False)
