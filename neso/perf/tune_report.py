"""Results of `neso perf tune`: files, HTML report and console."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from neso.perf.console import COLUMNS, WIDTH, cells, number, present_columns, table
from neso.perf.report.charts import Chart, Series
from neso.perf.report.html import figures, html_table, page

if TYPE_CHECKING:
    from neso.perf.tune import TuneResult


def write_result(result: TuneResult, folder: Path) -> None:
    """Write tune.json, the engine options as best_engine_config.json, and tune_report.html."""
    folder.mkdir(parents=True, exist_ok=True)
    best = result.best.settings if result.best is not None else {}
    (folder / "best_engine_config.json").write_text(json.dumps(best, indent=1), encoding="utf-8")
    content = {
        "model": result.model,
        "goal": result.goal.text,
        "best": best,
        "command": result.command,
        "confirmed": result.confirmed,
        "candidate": result.candidate,
        "ratio_to_default": None
        if result.ratio is None
        else [result.ratio.value, result.ratio.low, result.ratio.high],
        "stopped": result.stopped,
        "trials": [
            {
                "settings": trial.settings,
                "error": trial.error,
                "objective": None if trial.run is None else result.goal.value(trial.run),
                "meets_objectives": trial.run is not None and result.goal.is_met(trial.run),
            }
            for trial in result.trials
        ],
    }
    (folder / "tune.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    (folder / "tune_report.html").write_text(_report(result), encoding="utf-8")


_COLUMNS = (*COLUMNS[:5], ("good %", "good_request_share", "avg"))


def _rows(result: TuneResult) -> tuple[list[str], list[list[str]]]:
    runs = [trial.run for trial in result.trials if trial.run is not None]
    present = present_columns(_COLUMNS, runs)
    rows = [[trial.text, *cells(trial.run, present)] for trial in result.trials]
    return ["settings", *(title for title, _, _ in present)], rows


def _verdict(result: TuneResult) -> str:
    if result.ratio is None:
        return "No configuration is better than the default beyond the noise of the runs."
    ratio = result.ratio
    text = f"{result.goal.text}: {ratio.value:.3f} of the default (95 % interval {ratio.low:.3f} to {ratio.high:.3f})"
    return text if result.confirmed else f"{text}; not confirmed, so the default stays."


def _report(result: TuneResult) -> str:
    header, rows = _rows(result)
    values = [
        (position, result.goal.value(trial.run))
        for position, trial in enumerate(result.trials, 1)
        if trial.run is not None
    ]
    labels = [
        f"{trial.text}: {number(result.goal.value(trial.run))}"
        for trial in result.trials
        if trial.run is not None
    ]
    series = Series(
        "",
        [position - 0.5 for position, _ in values],
        [value for _, value in values],
        "bars",
        x2=[position + 0.4 for position, _ in values],
        labels=labels,
    )
    chart = Chart("Objective by trial", "trial", result.goal.metric, (series,))
    parts = [
        f"<h1>neso perf tune: {result.model}</h1>",
        f"<p>{_verdict(result)}</p><pre>{result.command}</pre>",
        figures([chart]),
        "<h2>Trials</h2>",
        html_table(header, rows),
    ]
    failed = [[trial.text, trial.error] for trial in result.trials if trial.error]
    if failed:
        parts += ["<h2>Configurations that did not run</h2>", html_table(["settings", "error"], failed)]
    return page(f"neso perf tune: {result.model}", "".join(parts))


def print_result(result: TuneResult) -> None:
    """Print the trials and the recommended command."""
    console = Console(width=WIDTH)
    header, rows = _rows(result)
    trials = table("Trials")
    for position, name in enumerate(header):
        trials.add_column(name, overflow="fold", justify="left" if position == 0 else "right")
    for row in rows:
        trials.add_row(*row)
    console.print(trials)
    if result.stopped:
        console.print(f"The search ended early: {result.stopped}.", style="yellow")
    console.print(_verdict(result), markup=False)
    console.print(result.command, style="bold", markup=False, soft_wrap=True)
