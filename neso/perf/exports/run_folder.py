"""Folder of a run: writes and reads its files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from neso.perf.errors import PerfError
from neso.perf.exports.genai_perf import write_csv, write_json, write_raw_profile
from neso.perf.exports.jsonl import write_jsonl
from neso.perf.inputs.options import InputOptions
from neso.perf.inputs.synthetic import tokenizer_for
from neso.perf.measurement import Measurement, endpoint_setting
from neso.perf.metrics import parse_slos
from neso.perf.output_options import OutputOptions
from neso.perf.records import Records, RunResult

RECORDS, RUN, REPORT = "records.npz", "run.json", "report.html"
MAX_INPUTS_BYTES = 64_000_000
"""Largest size of inputs.json."""
_RUN_FIELDS = tuple(field.name for field in fields(RunResult) if field.name != "records")


def measure(run: RunResult, options: OutputOptions) -> Measurement:
    """Prepare the metrics of a run, with the objectives and the tokenizer of the options."""
    tokenizer = None
    if options.check_token_counts or _lacks_counts(run):
        inputs = run.settings.get("input", {})
        chosen = InputOptions(
            tokenizer=inputs.get("tokenizer") or "", tokenizer_revision=inputs.get("tokenizer_revision")
        )
        tokenizer = tokenizer_for(chosen, tuple(endpoint_setting(run, "models") or ()))
    return Measurement(run, tokenizer=tokenizer, slos=parse_slos(options.goodput))


def _lacks_counts(run: RunResult) -> bool:
    """Whether texts were kept and no response has a token count."""
    return any(run.records.output_text) and bool((run.records.columns["output_tokens"] < 0).all())


def folder_name(run: RunResult) -> str:
    """Return the folder name of a run, as in genai-perf: MODEL-SERVICE-ENDPOINT-LOAD.

    Example: `neso-pilot-openai-chat-concurrency4`.
    """
    models = list(endpoint_setting(run, "models") or ["model"])
    model = f"{models[0]}_multi" if len(models) > 1 else str(models[0])
    kind = str(endpoint_setting(run, "endpoint_type") or "chat")
    parts = [model, service_kind(kind), kind, *(f"{name}{value}" for name, value in run.load.items())]
    return re.sub(r"[^\w.+=-]", "_", "-".join(parts))


def service_kind(endpoint_type: str) -> str:
    """Return openai, triton or inprocess, as the kind of the server."""
    if endpoint_type.startswith(("kserve", "generate", "triton", "tensor", "dynamic_grpc")):
        return "triton"
    return "inprocess" if endpoint_type.startswith(("engine", "inprocess")) else "openai"


def write_files(measurement: Measurement, options: OutputOptions) -> Path:
    """Write the files of a run and return its folder. Raises `PerfError` if they cannot be written."""
    run = measurement.result
    folder = options.artifact_dir / folder_name(run)
    name = options.profile_export.removesuffix(".json")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_run(run, folder)
        write_json(measurement, folder / f"{name}_genai_perf.json")
        write_csv(measurement, folder / f"{name}_genai_perf.csv")
        write_jsonl(measurement, folder / f"{name}.jsonl")
        if options.export_raw:
            write_raw_profile(measurement, folder / f"{name}.json")
        if options.report or options.generate_plots:
            from neso.perf.report.html import write_plots, write_report  # lazy: draws

            if options.report:
                write_report([measurement], folder / REPORT, slice_seconds=options.slice_duration)
            if options.generate_plots:
                write_plots([measurement], folder / "plots")
    except OSError as error:
        raise PerfError(f"cannot write to {folder}: {error.strerror or error}") from None
    return folder


def write_sweep(measurements: Sequence[Measurement], options: OutputOptions) -> Path | None:
    """Write the report of a sweep beside the folders of its runs."""
    if len(measurements) < 2:
        folder = options.artifact_dir / folder_name(measurements[0].result)
        return folder / REPORT if options.report else None
    if not options.report:
        return None
    from neso.perf.report.html import write_report  # lazy: draws

    links = [f"{folder_name(one.result)}/{REPORT}" for one in measurements]
    path = options.artifact_dir / "sweep_report.html"
    write_report(measurements, path, links=links)
    return path


def write_inputs(sessions: Iterable[Sequence[bytes]], folder: Path) -> None:
    """Write inputs.json in the form of genai-perf: the JSON bodies of the requests, by session.

    Sessions beyond `MAX_INPUTS_BYTES` are left out.
    """
    size = 0
    with (folder / "inputs.json").open("wb") as file:
        file.write(b'{"data":[')
        for number, bodies in enumerate(sessions):
            entry = (b"," if number else b"") + b'{"payload":[' + b",".join(bodies) + b"]}"
            size += len(entry)
            if number and size > MAX_INPUTS_BYTES:
                break
            file.write(entry)
        file.write(b"]}")


def save_run(run: RunResult, folder: Path) -> None:
    """Write the raw data of a run, which `load_run` reads."""
    run.records.save(folder / RECORDS)
    values = {name: getattr(run, name) for name in _RUN_FIELDS}
    (folder / RUN).write_text(json.dumps(values, indent=1, default=str), encoding="utf-8")


def load_run(folder: str | Path) -> RunResult:
    """Read the raw data of a run from its folder. Raises `PerfError` if it is not one."""
    path = Path(folder)
    try:
        values = json.loads((path / RUN).read_text(encoding="utf-8"))
        known = {name: values[name] for name in _RUN_FIELDS if name in values}
        return RunResult(records=Records.load(path / RECORDS), **known)
    except FileNotFoundError:
        raise PerfError(f"{path}: no run of neso perf, {RUN} or {RECORDS} is missing") from None
    except (OSError, ValueError, TypeError) as error:
        raise PerfError(f"{path}: cannot read the run: {error}") from None


def load_runs(folder: str | Path) -> list[RunResult]:
    """Read a run, or all runs in the folders of a folder, in the order of their load. Raises `PerfError`."""
    path = Path(folder)
    if (path / RUN).is_file():
        return [load_run(path)]
    found = [load_run(one.parent) for one in sorted(path.glob(f"*/{RUN}"))]
    if not found:
        raise PerfError(f"{path}: there is no run of neso perf in this folder")
    return sorted(found, key=lambda run: [float(v) for v in run.load.values() if isinstance(v, int | float)])
