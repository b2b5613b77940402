"""Exports with the keys of genai-perf and perf_analyzer."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np

from neso.perf.measurement import Measurement, as_dict, endpoint_setting
from neso.perf.metrics import METRICS
from neso.perf.records import RunResult

_STATISTICS = ("avg", "min", "max", "p99", "p95", "p90", "p75", "p50", "p25", "p10", "p5", "p1")
_PATHS = {
    "chat": "v1/chat/completions",
    "vision": "v1/chat/completions",
    "completions": "v1/completions",
    "embeddings": "v1/embeddings",
    "rankings": "v1/ranking",
}
"""Default paths, by which genai-perf recognizes the format of a response."""


def write_json(measurement: Measurement, path: Path) -> None:
    """Write unit and statistics of all metrics, then the options, errors and other facts of the run."""
    run = measurement.result
    content: dict[str, Any] = as_dict(measurement)
    if "goodput" in content:
        content["request_goodput"] = content["goodput"]  # the name in genai-perf
    content["input_config"] = _input_config(run)
    content["errors"] = {
        kind: {"count": number, "example": message} for kind, (number, message) in measurement.errors.items()
    }
    content["warnings"] = [*run.errors, *measurement.warnings]
    content["stop_reason"] = run.stop_reason
    content["output_tokens_source"] = measurement.output_tokens_source
    content["client"] = run.client
    content["telemetry_stats"] = run.telemetry.get("summary", {})
    path.write_text(json.dumps(content, indent=2, default=str, ensure_ascii=False), encoding="utf-8")


def _input_config(run: RunResult) -> dict[str, Any]:
    """Return all options, and those that identify a run also at the places where genai-perf has them."""
    endpoint = run.settings.get("endpoint", {})
    return {
        **run.settings,
        "load": run.load,
        "subcommand": "profile",
        "model_names": endpoint.get("models", []),
        "endpoint": {
            **endpoint,
            "type": endpoint.get("endpoint_type"),
            "url": next(iter(endpoint.get("urls") or ()), None),
        },
        "perf_analyzer": {"stimulus": run.load},
        "tokenizer": {"name": run.settings.get("input", {}).get("tokenizer")},
    }


def write_csv(measurement: Measurement, path: Path) -> None:
    """Write the statistics of the per-request metrics, then those of the run, each with a header line."""
    summaries = measurement.summaries
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["Metric", *_STATISTICS])
        for metric in METRICS:
            if metric.name in summaries and not metric.of_run:
                values = [f"{summaries[metric.name].get(name):,.2f}" for name in _STATISTICS]
                writer.writerow([f"{metric.title} ({metric.unit})", *values])
        writer.writerow([])
        writer.writerow(["Metric", "Value"])
        for metric in METRICS:
            if metric.name in summaries and metric.of_run:
                unit = "per sec" if metric.unit == "requests/sec" else metric.unit
                title = "Request Goodput" if metric.name == "goodput" else metric.title
                writer.writerow([f"{title} ({unit})", f"{summaries[metric.name].avg:,.2f}"])


def write_raw_profile(measurement: Measurement, path: Path) -> None:
    """Write the requests and responses in the form of perf_analyzer's `--profile-export-file`.

    Response texts are given once, with the last response: the client keeps no text of single chunks.
    """
    run, records = measurement.result, measurement.records
    kind = endpoint_setting(run, "endpoint_type") or "chat"
    mode, value = next(iter(run.load.items()), ("concurrency", 1))
    offset = records.epoch_offset_ns
    requests = []
    for i in range(len(records)):
        arrivals = records.arrivals_ns[records.arrival_offsets[i] : records.arrival_offsets[i + 1]] + offset
        texts = [""] * max(len(arrivals) - 1, 0) + [records.output_text[i] or ""]
        requests.append(
            {
                "timestamp": int(records.columns["start_ns"][i]) + offset,
                "request_inputs": {"index": int(records.columns["index"][i])},
                "response_timestamps": arrivals.tolist(),
                "response_outputs": [{"response": text} for text in texts[: max(1, len(arrivals))]],
            }
        )
    bounds = (np.array([run.start_ns, run.end_ns]) + offset).tolist()
    content = {
        "service_kind": "openai",
        "endpoint": endpoint_setting(run, "path") or _PATHS.get(kind, kind),
        "experiments": [
            {"experiment": {"mode": mode, "value": value}, "requests": requests, "window_boundaries": bounds}
        ],
        "version": "neso perf",
    }
    path.write_text(json.dumps(content, ensure_ascii=False, default=str), encoding="utf-8")
