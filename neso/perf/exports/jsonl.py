"""One JSON line for each request, in the form of aiperf's `profile_export.jsonl`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from neso.perf.measurement import Measurement
from neso.perf.metrics import METRICS
from neso.perf.records import Records

_ROWS = 4096
"""Number of elements of an array that become Python objects at once."""
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY


def write_jsonl(measurement: Measurement, path: Path) -> None:
    """Write the records of all requests without the warm-up, also failed ones, in the order of completion."""
    records = measurement.all_records
    metrics = _metrics(measurement)
    with path.open("wb") as file:
        for ok, metadata, error in zip(
            _elements(records.ok), _metadata(records), _errors(records), strict=True
        ):
            line = {"metadata": metadata, "metrics": next(metrics) if ok else {}, "error": error}
            file.write(orjson.dumps(line, option=_OPTIONS))


def _metadata(records: Records) -> Iterator[dict[str, Any]]:
    """Yield the metadata of each request."""
    columns, strings, offset = records.columns, records.strings, records.epoch_offset_ns
    start_ns, first_byte_ns = columns["start_ns"], columns["first_byte_ns"]
    rows = zip(
        _elements(columns["number"]),
        strings["session"],
        _elements(columns["turn"]),
        strings["model"],
        strings["adapter"],
        _elements(columns["index"]),
        _elements(columns["intended_ns"] + offset),
        _elements(np.where(start_ns > 0, start_ns + offset, 0)),
        _elements(np.where(first_byte_ns > 0, first_byte_ns + offset, 0)),
        _elements(columns["end_ns"] + offset),
        _elements(columns["worker"]),
        _elements(columns["warm_up"]),
        _elements(columns["cancelled"]),
        strict=True,
    )
    for (
        number,
        session,
        turn,
        model,
        adapter,
        index,
        intended,
        start,
        ack,
        end,
        worker,
        warm_up,
        cancelled,
    ) in rows:
        yield {
            "session_num": number,
            "conversation_id": session or None,
            "turn_index": turn,
            "model": model,
            "adapter": adapter or None,
            "input_index": index,
            "request_intended_ns": intended,
            "request_start_ns": start or None,
            "request_ack_ns": ack or None,
            "request_end_ns": end,
            "worker_id": f"worker_{worker}",
            "benchmark_phase": "warmup" if warm_up else "profiling",
            "was_cancelled": cancelled,
        }


def _metrics(measurement: Measurement) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each complete response."""
    found = [
        (metric.name, metric.unit, _elements(measurement.values[metric.name]))
        for metric in METRICS
        if metric.name in measurement.values
    ]
    gaps = measurement.gaps if measurement.streaming else np.zeros(0)
    start = 0
    for end in _elements(np.cumsum(np.maximum(measurement.num_events - 1, 0)).astype(np.int64)):
        metrics: dict[str, Any] = {
            name: {"value": value, "unit": unit}
            for name, unit, values in found
            if (value := next(values)) == value  # not NaN: the request has no such value
        }
        if len(request_gaps := gaps[start:end]):
            metrics["inter_chunk_latency"] = {"value": request_gaps, "unit": "ms"}
        start = end
        yield metrics


def _errors(records: Records) -> Iterator[dict[str, Any] | None]:
    strings = records.strings
    for kind, message, status in zip(
        strings["error_kind"], strings["error_message"], _elements(records.columns["status"]), strict=True
    ):
        yield {"type": kind, "code": status or None, "message": message} if kind else None


def _elements(array: np.ndarray) -> Iterator[Any]:
    """Yield the elements as Python objects: `tolist` of many is much faster than indexing, and of all takes memory."""
    for start in range(0, len(array), _ROWS):
        yield from array[start : start + _ROWS].tolist()
