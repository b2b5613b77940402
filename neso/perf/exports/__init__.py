"""Exports: the files of a run and of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from neso.perf.measurement import Measurement
    from neso.perf.output_options import OutputOptions
    from neso.perf.records import RunResult


def write_run(run: RunResult, options: OutputOptions) -> Path:
    """Write all files of one run, print its table, and return the folder of the run. Raises `PerfError`."""
    from neso.perf.console import print_run
    from neso.perf.exports.run_folder import measure, write_files

    measurement = measure(run, options)
    folder = write_files(measurement, options)
    print_run(measurement, verbose=options.verbose)
    return folder


def finish(runs: list[RunResult], options: OutputOptions) -> Path | None:
    """Print the table of a sweep and write its report. Returns the report, if one is written."""
    from neso.perf.console import print_sweep
    from neso.perf.exports.run_folder import measure, write_sweep

    if not runs:
        return None
    measurements: list[Measurement] = [measure(run, options) for run in runs]
    if len(runs) > 1:
        print_sweep(measurements)
    return write_sweep(measurements, options)
